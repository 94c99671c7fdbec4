"""`hf-dflash bench` when something goes wrong: methods that fail, a missing matplotlib, folders and names."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_dflash.bench import methods as methods_module
from hf_dflash.bench import report, runner
from hf_dflash.draft.loading import load_draft
from hf_dflash.training import save_draft

PAIRS = Path(__file__).parent / "data" / "pairs"
SHORT = ["-n", "6", "-p", "chat:2"]


@pytest.fixture
def bench(run_cli, tiny_folders, tmp_path):
    def run(*arguments, pair=(tiny_folders.target, tiny_folders.draft), out=tmp_path / "out"):
        return run_cli("bench", "-t", pair[0], "-d", pair[1], *SHORT, *arguments, "--device-map", "cpu", "--out", out)

    return run


@pytest.fixture
def results(tmp_path):
    return lambda: report.Results.read_json(tmp_path / "out" / "results.json")


def measured(results: report.Results) -> set[str]:
    return {run.method for run in results.runs}


@pytest.fixture
def breaks(monkeypatch):
    """Let a method raise in a certain call of its own."""

    def break_method(name: str, call: int, error: Exception) -> None:
        make, calls = methods_module.METHODS[name], []

        def broken(pair):
            method = make(pair)

            def decode(inputs, arguments):
                calls.append(1)
                if len(calls) == call:
                    raise error
                return method.decode(inputs, arguments)

            return replace(method, decode=decode)

        monkeypatch.setitem(methods_module.METHODS, name, broken)

    return break_method


@pytest.mark.parametrize(
    ("call", "where"), [(1, "in its warm-up"), (2, "on the prompt"), (3, "on the prompt")], ids=["warm-up", "1", "2"]
)
@pytest.mark.parametrize(
    "error", [RuntimeError("cannot [go]\non"), torch.OutOfMemoryError("2 GiB")], ids=["RuntimeError", "OutOfMemory"]
)
def test_a_method_that_fails_is_left_out_and_the_others_stand(bench, results, breaks, call, where, error):
    breaks("prompt-lookup", call, error)
    ended = bench("-m", "prompt-lookup", "-m", "dflash")
    assert ended.code == 0, ended.err
    stored = results()
    assert measured(stored) == {"plain", "dflash"} and len(stored.runs) == 4
    reason = stored.left_out["prompt-lookup"]
    assert reason.startswith(f"failed {where}") and type(error).__name__ in reason and "\n" not in reason
    assert f"prompt-lookup was skipped: {reason}" in ended.err
    assert "| 2 chat | 0 | dflash |" in ended.out and "prompt-lookup" not in ended.out


def test_a_method_whose_text_cannot_be_compared_is_left_out(bench, results, monkeypatch):
    compare_texts, calls = runner.compare_texts, []

    def fail_first(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory for the comparison")
        return compare_texts(*arguments, **options)

    monkeypatch.setattr(runner, "compare_texts", fail_first)
    ended = bench("-m", "prompt-lookup", "-m", "dflash")
    assert ended.code == 0, ended.err
    (left_out,) = results().left_out.items()
    assert measured(results()) == {"plain", "prompt-lookup", "dflash"} - {left_out[0]}
    assert "in the comparison with plain: RuntimeError: no memory" in left_out[1]


def test_with_several_pairs_a_method_is_left_out_of_its_own(run_cli, tiny_folders, tmp_path, breaks, results):
    breaks("dflash", 2, RuntimeError("not this time"))
    pairs = ["-t", tiny_folders.target, "-d", tiny_folders.draft, "-d", f"{tiny_folders.draft}/"]
    ended = run_cli("bench", *pairs, *SHORT, "-m", "dflash", "--device-map", "cpu", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert list(results().left_out) == [f"dflash ({tiny_folders.target} + {tiny_folders.draft})"]
    drafts = [run.draft for run in results().runs if run.method == "dflash"]
    assert drafts == [f"{tiny_folders.draft}/"] * 2


def test_plain_alone_is_reported_and_ends_with_1(bench, results, breaks):
    breaks("dflash", 1, RuntimeError("never"))
    ended = bench("-m", "dflash")
    assert ended.code == 1
    assert measured(results()) == {"plain"}
    assert "| plain |" in ended.out and "dflash was skipped: failed in its warm-up: RuntimeError: never" in ended.err
    assert bench("-m", "plain").code == 0


def test_an_error_of_plain_ends_the_benchmark_with_a_report_of_what_was_done(bench, results, breaks):
    breaks("plain", 3, RuntimeError("plain cannot"))
    ended = bench("-m", "dflash")
    assert ended.code == 1
    assert "plain cannot" in ended.err and "this report covers the prompts that were finished" in ended.err
    assert "| 1 chat | 0 | dflash |" in ended.out
    assert len(results().runs) == 2


def test_the_default_methods_on_a_recurrent_target(bench, results):
    """transformers refuses prompt lookup and its own DFlash path there."""
    ended = bench(pair=(PAIRS / "hybrid" / "target", PAIRS / "hybrid" / "draft"))
    assert ended.code == 0, ended.err
    assert {"plain", "dflash"} <= measured(results())
    assert results().left_out["prompt-lookup"].startswith("failed in its warm-up: ValueError: ")


def test_the_authors_loop_is_left_out_if_target_and_draft_differ_in_dtype(bench, results, tmp_path):
    pytest.importorskip("dflash")
    save_draft(load_draft(PAIRS / "dense" / "draft", dtype=torch.bfloat16), tmp_path / "draft", "zlab")
    pair = (PAIRS / "dense" / "target", tmp_path / "draft")
    ended = bench("--dtype", "float32", pair=pair)
    assert ended.code == 0, ended.err
    assert "dflash" in measured(results())
    assert "the target is in float32 and the draft in bfloat16" in results().left_out["authors"]
    assert bench("-m", "authors", pair=pair, out=tmp_path / "same").code == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_without_matplotlib_only_the_plots_are_missing(bench, tmp_path, monkeypatch, as_json):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = bench("-m", "dflash", *["--json"] * as_json)
    assert ended.code == 0, ended.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "results.csv", "table.md"}
    if as_json:
        assert [row["method"] for row in json.loads(ended.out)] == ["plain", "dflash"]
    else:
        assert "| 2 chat | 0 | dflash |" in ended.out
    (notice,) = [line for line in ended.err.splitlines() if line.startswith("no plots: ")]
    assert "matplotlib" in notice


def test_plots_of_plain_alone(bench, tmp_path):
    pytest.importorskip("matplotlib")
    assert bench("-m", "plain").code == 0
    assert not list((tmp_path / "out").glob("*.png"))


# --- before anything is loaded


@pytest.fixture
def nothing_loads(monkeypatch):
    def fail(*_, **__):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


def test_an_unknown_method_is_refused(bench, tmp_path, nothing_loads):
    ended = bench("-m", "magic")
    assert ended.code == 1 and "Unknown method 'magic'" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["taken", "taken/inside"])
def test_a_file_as_the_folder_for_results_is_wrong_usage(bench, tmp_path, nothing_loads, out):
    (tmp_path / "taken").write_text("mine")
    assert bench(out=tmp_path / out).code == 2
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", '{"runs": 3}'),
        ("results.json", "[1]"),
        ("results.json", "not JSON"),
        ("results.csv", "name,score\nme,1\n"),
        ("table.md", "| my | table |"),
        ("speed_up.png", "my picture"),
    ],
)
def test_results_that_another_program_wrote_are_not_replaced(bench, tmp_path, nothing_loads, name, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    ended = bench()
    assert ended.code == 1
    assert name in ended.err and "Choose another --out" in ended.err
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {name: content}


def test_results_of_an_earlier_benchmark_are_replaced_beside_other_files(bench, run_cli, tmp_path, results):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for methods in (["dflash"], ["dflash-b3"]):
        assert bench("-m", *methods).code == 0
        assert measured(results()) == {"plain", *methods}
    for _ in range(2):
        again = run_cli("bench", "--from", tmp_path / "out" / "results.json", "--out", tmp_path / "again")
        assert again.code == 0, again.err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_folder_to_report_from_is_wrong_usage(run_cli, tmp_path):
    assert run_cli("bench", "--from", tmp_path, "--out", tmp_path / "out").code == 2
