"""Prompts, regenerated responses and training records: identity, resuming, and error messages for bad input."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_dflash.draft.errors import MissingPackageError, PromptError, TrainingError
from hf_dflash.prompts import to_messages
from hf_dflash.training.prompts import TokenizedPrompt, batches, read_prompts
from hf_dflash.training.records import RecordDataset, collate, read_records, split
from hf_dflash.training.regenerate import RegenerationSettings, check_not_in_use, regenerate
from tests.tiny_training import tiny_target, write_records


class Letters:
    """A character tokenizer with just enough of transformers' interface to read prompts and write responses."""

    pad_token_id = 1
    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [2 + ord(letter) % 90 for letter in text]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **options):
        assert add_generation_prompt and not tokenize
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>" + str(options.get("mood", ""))

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def prompts_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_become_messages_up_to_the_last_user_turn():
    user = {"role": "user", "content": "hi"}
    reply = {"role": "assistant", "content": "hello"}
    assert to_messages({"messages": [user, reply]}, "x") == [user]
    assert to_messages({"messages": [user, reply, user]}, "x") == [user, reply, user]
    assert to_messages({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "b"}]}, "x") == [
        user
    ]
    assert to_messages({"instruction": "add", "input": "1 2"}, "x") == [{"role": "user", "content": "add\n\n1 2"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "found the keys"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": [1]}]}, "text content"),
        ({"messages": ["hi"]}, "a message must be"),
    ],
)
def test_rows_that_are_not_prompts(row, message):
    with pytest.raises(PromptError, match=message):
        to_messages(row, "x")


def test_prompts_are_deduplicated_and_long_ones_skipped(tmp_path):
    path = prompts_file(
        tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "one"}, {"prompt": "x" * 99}]
    )
    prompts = read_prompts(path, Letters(), max_prompt_tokens=30)
    assert [prompt.row["prompt"] for prompt in prompts] == ["one", "two"]
    assert read_prompts(path, Letters(), chat_template_kwargs={"mood": "sad"})[0].ids != prompts[0].ids


def test_broken_prompt_files(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TrainingError, match="is empty"):
        read_prompts(tmp_path / "empty.jsonl", Letters())
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(PromptError, match="line 2: not JSON"):
        read_prompts(tmp_path / "broken.jsonl", Letters())
    with pytest.raises(TrainingError, match="no prompts left"):
        read_prompts(prompts_file(tmp_path / "long.jsonl", [{"prompt": "abc"}]), Letters(), max_prompt_tokens=2)


def test_batches_group_similar_lengths_and_lose_nothing():
    prompts = [TokenizedPrompt(tuple(range(n % 7 + 1)) + (n,)) for n in range(20)]
    cut = batches(prompts, batch_size=4, window=2)
    assert sorted(p.key for batch in cut for p in batch) == sorted(p.key for p in prompts)
    assert [len(p.ids) for batch in cut[:2] for p in batch] == sorted(len(p.ids) for p in prompts[:8])


@pytest.fixture(scope="module")
def target():
    model = tiny_target()
    model.generation_config.eos_token_id = [0, 7]
    return model


def some_prompts():
    generator = torch.Generator().manual_seed(3)
    return [
        TokenizedPrompt(tuple(torch.randint(2, 90, (3 + n % 4,), generator=generator).tolist()), {"kind": "k"})
        for n in range(10)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_responses_do_not_depend_on_interruptions(target, tmp_path, temperature):
    settings = RegenerationSettings(max_new_tokens=12, temperature=temperature, batch_size=4, seed=5)
    whole = regenerate(target, Letters(), some_prompts(), tmp_path / "whole.jsonl", settings)

    class Stop(Exception):
        pass

    def stop(done, tokens):
        raise Stop

    pieces = tmp_path / "pieces.jsonl"
    with pytest.raises(Stop):
        regenerate(target, Letters(), some_prompts(), pieces, settings, on_batch=stop)
    assert len(pieces.read_text().splitlines()) == 4
    with pieces.open("a") as file:  # a crash in the middle of a line
        file.write('{"key": "abc", "prompt_')
    seen = []
    regenerate(target, Letters(), some_prompts(), pieces, settings, on_batch=lambda done, tokens: seen.append(done))
    assert pieces.read_text() == whole.read_text()
    assert seen[-1] == 10


def test_responses_are_the_targets_and_keep_the_stop_token(target, tmp_path):
    out = regenerate(
        target, Letters(), some_prompts(), tmp_path / "r.jsonl", RegenerationSettings(max_new_tokens=30, batch_size=4)
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["finish"] for line in lines} == {"eos", "length"}
    for line in lines:
        prompt = torch.tensor([line["prompt_ids"]])
        alone = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
        assert alone[0, prompt.shape[1] :].tolist() == line["response_ids"]
        assert (line["response_ids"][-1] in (0, 7)) == (line["finish"] == "eos")
        assert line["kind"] == "k"


def test_responses_of_different_settings_are_not_mixed_in_one_file(target, tmp_path):
    out, prompts = tmp_path / "r.jsonl", some_prompts()[:2]
    regenerate(target, Letters(), prompts, out, RegenerationSettings(max_new_tokens=4))
    with pytest.raises(TrainingError, match=r"max_new_tokens 4 \(now 5\)"):
        regenerate(target, Letters(), prompts, out, RegenerationSettings(max_new_tokens=5))
    (tmp_path / "other.jsonl").write_text("hello\n")
    with pytest.raises(TrainingError, match="was not written by"):
        regenerate(target, Letters(), prompts, tmp_path / "other.jsonl", RegenerationSettings())


def test_responses_of_another_target_are_not_mixed_in_one_file(target, tmp_path):
    """Its dtype, its revision and the values of its weights are part of the settings."""
    out, prompts, settings = tmp_path / "r.jsonl", some_prompts()[:2], RegenerationSettings(max_new_tokens=4)
    regenerate(target, Letters(), prompts, out, settings)
    before = out.read_bytes()
    others = {
        r"dtype 'float32' \(now 'bfloat16'\)": copy.deepcopy(target).to(torch.bfloat16),
        r"revision None \(now 'abc'\)": copy.deepcopy(target),
        "weights": copy.deepcopy(target),
    }
    others[r"revision None \(now 'abc'\)"].config._commit_hash = "abc"
    others["weights"].lm_head.weight[3, 4] += 1e-3
    for message, other in others.items():
        with pytest.raises(TrainingError, match=f"different settings: .*{message}"):
            regenerate(other, Letters(), some_prompts(), out, settings)
    assert out.read_bytes() == before
    regenerate(copy.deepcopy(target), Letters(), prompts, out, settings)


def test_a_file_of_an_earlier_version_is_continued(target, tmp_path):
    """Its settings lack what was not recorded then."""
    out, prompts, settings = tmp_path / "r.jsonl", some_prompts(), RegenerationSettings(max_new_tokens=4)
    regenerate(target, Letters(), prompts[:2], out, settings)
    path = tmp_path / "r.jsonl.settings.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({key: stored[key] for key in ("target", "vocab_size", "max_new_tokens", "seed")}))
    regenerate(target, Letters(), prompts, out, settings)
    assert len(out.read_text().splitlines()) == len(prompts)
    for text in ("{broken", "[]"):
        path.write_text(text)
        with pytest.raises(TrainingError, match=r"settings\.json"):
            regenerate(target, Letters(), prompts, out, settings)


def test_two_processes_do_not_write_one_file(target, tmp_path):
    """The second is refused, before and after it has loaded the target; a crash of the first frees the file."""
    out, settings = tmp_path / "r.jsonl", RegenerationSettings(max_new_tokens=4, batch_size=4)
    regenerate(target, Letters(), some_prompts()[:2], out, settings)
    before = out.read_bytes()
    code = (
        "import sys\nfrom hf_dflash.training.regenerate import _opened\nfrom pathlib import Path\n"
        "with _opened(Path(sys.argv[1])):\n    print('writing', flush=True)\n    sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    with first:
        assert first.stdout.readline() == "writing\n"
        for second in (
            lambda: check_not_in_use(out),
            lambda: regenerate(target, Letters(), some_prompts(), out, settings),
        ):
            with pytest.raises(TrainingError, match="is being written by another process"):
                second()
        assert out.read_bytes() == before
        first.kill()
    regenerate(target, Letters(), some_prompts(), out, settings)
    keys = [json.loads(line)["key"] for line in out.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == len(some_prompts())


def test_a_second_call_in_the_same_process_is_refused_too(target, tmp_path):
    def again(done, tokens):
        regenerate(target, Letters(), some_prompts(), tmp_path / "r.jsonl", settings)

    settings = RegenerationSettings(max_new_tokens=4, batch_size=4)
    with pytest.raises(TrainingError, match="is being written by another process"):
        regenerate(target, Letters(), some_prompts(), tmp_path / "r.jsonl", settings, on_batch=again)


def test_a_file_system_without_locks_is_reported(target, tmp_path, monkeypatch):
    def no_locks(file):
        raise OSError(95, "Operation not supported")

    module = sys.modules[regenerate.__module__]
    monkeypatch.setattr(module, "lock_exclusively", no_locks)
    warnings = []
    monkeypatch.setattr(module.logger, "warning", warnings.append)
    regenerate(target, Letters(), some_prompts()[:1], tmp_path / "r.jsonl", RegenerationSettings(max_new_tokens=2))
    assert "its file system has no locks" in warnings[0]


@pytest.mark.parametrize("place", ["folder", "file/r.jsonl"])
def test_a_file_that_cannot_be_written_is_named(target, tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=f"{place} cannot be written"):
        regenerate(target, Letters(), some_prompts(), tmp_path / place, RegenerationSettings())


def read(path, **changes):
    return read_records(path, **{"block_size": 4, "max_length": 100, "vocab_size": 96, **changes})


def test_records_are_truncated_and_short_ones_dropped(tmp_path):
    path = write_records(tmp_path / "d.jsonl", count=3, prompt=5, response=20)
    with path.open("a") as file:
        file.write(json.dumps({"prompt_ids": [2, 3], "response_ids": [4, 5, 6]}) + "\n")
    records = read(path, max_length=12)
    assert ([len(r) for r in records.kept], records.too_short, records.truncated) == ([12, 12, 12], 1, 3)
    assert records.num_tokens == 36


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "`prompt_ids` must be a list of token ids"),
        ({"prompt_ids": [1], "response_ids": ["a"]}, "`response_ids` must be a list"),
        (
            {"prompt_ids": [1, 96], "response_ids": [2]},
            "token 96 in `prompt_ids` is outside the target's vocabulary of 96",
        ),
        ({"prompt_ids": [1], "response_ids": [2, 3, 4]}, "none of the 1 responses fills a block of 4 tokens"),
    ],
)
def test_bad_records(tmp_path, row, message):
    with pytest.raises(TrainingError, match=message):
        read(prompts_file(tmp_path / "d.jsonl", [row]))


def test_a_missing_data_file_is_named(tmp_path):
    with pytest.raises(TrainingError, match="does not exist"):
        read(tmp_path / "nothing.jsonl")


def test_the_split_is_reproducible_and_never_empty():
    records = [SimpleNamespace(name=n, prompt_ids=(n,)) for n in range(20)]
    train, held_out = split(records, 5, seed=1)
    assert split(records, 5, seed=1) == (train, held_out)
    assert split(records, 5, seed=2) != (train, held_out)
    assert len(held_out) == 5 and sorted(r.name for r in train + held_out) == list(range(20))
    with pytest.raises(TrainingError, match="lower `held_out`"):
        split(records, 20, seed=1)


def test_collated_rows_are_padded_on_the_right(tmp_path):
    records = read(write_records(tmp_path / "d.jsonl", count=2, prompt=3, response=6), max_length=9).kept
    short = type(records[0])("s", records[1].prompt_ids, records[1].response_ids[:4])
    data = RecordDataset([records[0], short])
    batch = collate([data[1], data[0]])
    assert batch["lengths"].tolist() == [7, 9] and batch["indices"].tolist() == [1, 0]
    assert batch["input_ids"][0].tolist() == [*short.prompt_ids, *short.response_ids, 0, 0]


def test_a_name_that_is_not_a_file_needs_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="'some/data' is not a file.*pip install datasets"):
        read_prompts("some/data", Letters())


def test_a_name_that_is_not_a_file_is_read_with_datasets(monkeypatch):
    loaded = SimpleNamespace(load_dataset=lambda name, split: [{"prompt": f"{name} {split}"}])
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    assert read_prompts("some/data", Letters(), split="test")[0].row == {"prompt": "some/data test"}
