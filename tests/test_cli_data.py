"""`hf-dflash data`: what is refused before a model is loaded, and the prompts it reads."""

import json

import pytest
from transformers import AutoModelForCausalLM


@pytest.fixture
def files(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    return tmp_path


@pytest.fixture
def nothing_loads(monkeypatch):
    def fail(*_, **__):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


def test_a_folder_for_the_responses_is_wrong_usage(run_cli, tiny_folders, files, nothing_loads):
    ended = run_cli("data", "-t", tiny_folders.target, "--prompts", files / "prompts.jsonl", "--out", files)
    assert ended.code == 2
    assert list(files.iterdir()) == [files / "prompts.jsonl"]


def test_a_file_where_a_folder_should_be_is_wrong_usage(run_cli, tiny_folders, files, nothing_loads):
    (files / "taken").write_text("mine")
    out = files / "taken" / "data.jsonl"
    ended = run_cli("data", "-t", tiny_folders.target, "--prompts", files / "prompts.jsonl", "--out", out)
    assert ended.code == 2
    assert "cannot be made" in " ".join(ended.err.replace("│", " ").split())
    assert (files / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "caf\xe9"}\n', "line 2: found the byte 0xe9 at character 16"),
        (b'{"prompt": "\\ud800"}\n', "line 2: found the lone surrogate U+D800 at character 1"),
    ],
)
def test_prompts_that_are_not_unicode_are_named(run_cli, tiny_folders, files, nothing_loads, line, expected):
    with open(files / "prompts.jsonl", "ab") as prompts:
        prompts.write(line)
    out = files / "data.jsonl"
    ended = run_cli("data", "-t", tiny_folders.target, "--prompts", files / "prompts.jsonl", "--out", out)
    assert ended.code == 1
    assert expected in ended.err and str(files / "prompts.jsonl") in ended.err
    assert not out.exists()


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(run_cli, tiny_folders, files):
    written = {}
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (files / f"{name}.jsonl").write_bytes(mark + (files / "prompts.jsonl").read_bytes())
        out = files / f"{name}-responses.jsonl"
        ended = run_cli(
            "data", "-t", tiny_folders.target, "--prompts", files / f"{name}.jsonl", "--out", out, "-n", "4",
            "--device-map", "cpu",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        written[name] = out.read_text()
    assert written["plain"] == written["marked"] != ""
