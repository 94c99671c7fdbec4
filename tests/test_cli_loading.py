"""Where every command puts the models. `meta`, a device that every machine has, stands for an accelerator."""

import json

import pytest

from hf_dflash import pair as pair_module
from hf_dflash import smollm2


@pytest.fixture(params=["generate", "chat", "bench", "data", "demo"])
def command(request, tiny_folders, tmp_path, monkeypatch) -> list[str]:
    """A command that loads the tiny pair."""
    monkeypatch.setattr(smollm2, "demo_target", lambda log: tiny_folders.target)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    pair = ["-t", tiny_folders.target, "--draft", tiny_folders.draft]
    return {
        "generate": ["generate", *pair, "-n", "4", "hello"],
        "chat": ["chat", *pair, "-n", "4"],
        "bench": ["bench", *pair, "-n", "4", "-p", "chat:1", "-m", "dflash", "--out", tmp_path / "bench"],
        "data": ["data", *pair, "-n", "4", "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "data.jsonl"],
        "demo": ["demo", *pair[2:], "-n", "4", "--dtype", "float32", "-p", "hello"],
    }[request.param]


@pytest.fixture
def with_accelerator(monkeypatch):
    monkeypatch.setattr(pair_module, "default_device", lambda: "meta")


def test_the_accelerator_is_used_and_printed(run_cli, command, with_accelerator):
    ended = run_cli(*command, stdin="/quit\n")  # on `meta` nothing can be decoded
    assert "target and draft on meta" in ended.err
    assert "meta" not in ended.out


def test_device_map_overrides_it(run_cli, command, with_accelerator):
    ended = run_cli(*command, "--device-map", "cpu", stdin="/quit\n")
    assert ended.code == 0, ended.err
    assert "target and draft on cpu" in ended.err
    assert "target and draft" not in ended.out


def test_without_an_accelerator_it_is_the_cpu(run_cli, command, monkeypatch):
    monkeypatch.setattr(pair_module, "default_device", lambda: "cpu")
    ended = run_cli(*command, stdin="/quit\n")
    assert ended.code == 0, ended.err
    assert "target and draft on cpu" in ended.err


def test_data_without_a_draft_says_where_the_target_is(run_cli, tiny_folders, tmp_path, with_accelerator):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    files = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "data.jsonl"]
    ended = run_cli("data", "-t", tiny_folders.target, *files, "-n", "4", "--device-map", "cpu")
    assert ended.code == 0, ended.err
    assert "target on cpu" in ended.err


@pytest.mark.parametrize("command", ["generate", "chat", "demo"], indirect=True)
def test_the_block_size_is_checked_before_anything_is_decoded(run_cli, command):
    ended = run_cli(*command, "--block-size", "64", stdin="hello\n")
    assert (ended.code, ended.out) == (1, "")
    assert "2 to 8, found 64" in ended.err and ended.err.count("\n") == 1
