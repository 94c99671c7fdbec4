"""Equal terms: a checkpoint's own generation defaults reach no method of a benchmark."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from hf_dflash.bench import report, runner
from hf_dflash.bench.methods import make_method
from hf_dflash.bench.runner import Plan, methods_of, run_pair
from hf_dflash.bench.terms import equal_terms, set_aside
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.loading import load_draft
from hf_dflash.pair import Pair, encode, load_pair, sampling_arguments
from hf_dflash.prompts import Prompt
from hf_dflash.training import save_draft

#: With top-k 1, sampling always draws the same text; the penalties change a greedy text.
OWN = {"do_sample": True, "temperature": 0.6, "top_k": 1, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1}
TOKENS = 24


@pytest.fixture(scope="module")
def pair(tiny_folders) -> Pair:
    pair = load_pair(tiny_folders.target, tiny_folders.draft, device_map="cpu")
    own = pair.target.generation_config
    # Without a stop, so that all texts are equally long.
    pair.target.generation_config = GenerationConfig(**OWN, pad_token_id=own.pad_token_id)
    return pair


@pytest.fixture(scope="module")
def inputs(pair):
    return encode(pair, "some text")


@pytest.fixture(scope="module")
def argmax_text(pair, inputs) -> torch.Tensor:
    """The greedy text of the logits alone."""
    ids = inputs["input_ids"]
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, pair.target(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("name", ["plain", "prompt-lookup", "native", "dflash"])
def test_greedy_is_the_argmax_whatever_the_checkpoint_penalizes(pair, inputs, argmax_text, name):
    own = pair.target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    assert not torch.equal(own, argmax_text), "the penalties must change the text for this test to mean anything"
    ids, _ = make_method(name, pair).decode(inputs, {"max_new_tokens": TOKENS, **sampling_arguments(0.0)})
    assert torch.equal(ids, argmax_text)


@pytest.mark.parametrize("name", ["plain", "prompt-lookup", "native", "dflash"])
def test_a_sampled_token_is_drawn_from_the_whole_vocabulary(pair, inputs, name, monkeypatch):
    method, processors = make_method(name, pair), []
    make_processors = type(pair.target)._get_logits_processor

    def noted(self, *arguments, **options):
        made = make_processors(self, *arguments, **options)
        processors.append([type(each).__name__ for each in made])
        return made

    monkeypatch.setattr(type(pair.target), "_get_logits_processor", noted)
    texts = set()
    for seed in range(4):
        torch.manual_seed(seed)
        ids, _ = method.decode(inputs, {"max_new_tokens": TOKENS, **sampling_arguments(1.5)})
        texts.add(tuple(ids[0].tolist()))
    assert len(texts) == 4
    # Not even transformers' own top-k of 50.
    assert {tuple(each) for each in processors} == {("TemperatureLogitsWarper",)}


def test_the_authors_loop_gets_the_same_settings(tmp_path, monkeypatch):
    authors = pytest.importorskip("dflash.model")
    folder = Path(__file__).parent / "data" / "pairs" / "dense"
    save_draft(load_draft(folder / "draft", dtype=torch.float32), tmp_path / "draft", "zlab")
    pair = load_pair(str(folder / "target"), str(tmp_path / "draft"), dtype="float32", device_map="cpu")
    pair.target.generation_config = GenerationConfig(**OWN, eos_token_id=0, pad_token_id=0)
    seen, spec_generate = [], authors.DFlashDraftModel.spec_generate

    def noted(self, *arguments, **options):
        seen.append({name: options[name] for name in ("temperature", "top_p", "top_k", "stop_token_ids")})
        return spec_generate(self, *arguments, **options)

    monkeypatch.setattr(authors.DFlashDraftModel, "spec_generate", noted)
    method = make_method("authors", pair)
    ids = torch.arange(30, 54)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for temperature in (0.0, 0.8):
        method.decode(inputs, {"max_new_tokens": 4, **sampling_arguments(temperature)})
    assert seen == [
        {"temperature": temperature, "top_p": 1.0, "top_k": 0, "stop_token_ids": [0]} for temperature in (0.0, 0.8)
    ]
    with pytest.raises(UnsupportedOptionError, match="does not know min_p, repetition_penalty"):
        method.decode(inputs, {"max_new_tokens": 4, "repetition_penalty": 1.1, "min_p": 0.1})


def test_the_own_defaults_come_back(pair):
    own = pair.target.generation_config
    with pytest.raises(KeyError), equal_terms(pair.target):
        assert pair.target.generation_config.repetition_penalty is None
        assert pair.target.generation_config.pad_token_id == own.pad_token_id
        raise KeyError
    assert pair.target.generation_config is own


def test_what_is_set_aside(pair):
    assert set_aside(pair.target) == {"top_k": 1, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1}
    with equal_terms(pair.target):
        assert set_aside(pair.target) == {}


def test_texts_are_compared_on_the_same_terms(pair, monkeypatch):
    compare_texts, penalties = runner.compare_texts, []

    def noted(target, *arguments, **options):
        penalties.append(target.generation_config.repetition_penalty)
        return compare_texts(target, *arguments, **options)

    monkeypatch.setattr(runner, "compare_texts", noted)
    prompts = [Prompt("set", "p", [{"role": "user", "content": "question"}])]
    plan = Plan(["prompt-lookup", "dflash"], prompts, [0.0, 0.8], max_new_tokens=16)
    methods, _ = methods_of(plan, pair)
    runs = [run for batch in run_pair(pair, plan, methods) for run in batch]
    compared = {(run.method, run.temperature): run.same for run in runs if run.same is not None}
    assert compared == {("prompt-lookup", 0.0): True, ("dflash", 0.0): True, ("dflash", 0.8): True}
    assert penalties == [None] * 3


def test_the_command_prints_and_stores_what_was_set_aside(run_cli, tiny_folders, tmp_path):
    target = Path(shutil.copytree(tiny_folders.target, tmp_path / "target"))
    path = target / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "top_k": 20, "repetition_penalty": 1.1}))
    what = ["-p", "chat:1", "-n", "4", "-m", "dflash", "--device-map", "cpu"]
    ended = run_cli("bench", "-t", target, "-d", tiny_folders.draft, *what, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.err.splitlines() if "set aside" in line]
    assert "top_k = 20" in line and "repetition_penalty = 1.1" in line
    settings = report.Results.read_json(tmp_path / "out" / "results.json").settings
    assert settings["set_aside"] == {str(target): {"top_k": 20, "repetition_penalty": 1.1}}
    assert settings["device"] == "cpu"
    plain = run_cli("bench", "-t", tiny_folders.target, "-d", tiny_folders.draft, *what, "--out", tmp_path / "plain")
    assert "set aside" not in plain.err
