"""Target states and the records they belong to: cached states, the teacher's logits, the split, resumed runs."""

import copy
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
import transformers
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import hf_dflash.training.trainer as trainer_module
from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training import train
from hf_dflash.training.objective import Objective
from hf_dflash.training.packing import IGNORED
from hf_dflash.training.records import Record, RecordDataset, collate, read_records, split
from hf_dflash.training.setup_draft import make_config
from hf_dflash.training.state_cache import (
    CachedStates,
    build_state_cache,
    config_fingerprint,
    describe_states,
    weights_fingerprint,
)
from hf_dflash.training.states import LogitTransform, StateCapture, measure_logit_transform
from tests.tiny_training import VOCABULARY, tiny_settings, tiny_target, write_records


@pytest.fixture(scope="module")
def model():
    return tiny_target()


def ignore(line):
    """A `log` that keeps nothing."""


def rows(seed, count=8, response=20, prompts=0):
    """Lines as `hf-dflash data` writes them, whose key is a hash of the prompt; `seed` chooses the responses."""
    of_prompts, of_responses = torch.Generator().manual_seed(prompts), torch.Generator().manual_seed(1000 + seed)
    draw = lambda length, generator: torch.randint(2, 90, (length,), generator=generator).tolist()  # noqa: E731
    return [
        {"key": f"prompt{n}", "prompt_ids": draw(5, of_prompts), "response_ids": draw(response, of_responses)}
        for n in range(count)
    ]


def write(path, *parts):
    path.write_text("".join(json.dumps(row) + "\n" for part in parts for row in part))
    return path


def read(path):
    return read_records(path, block_size=4, max_length=100, vocab_size=VOCABULARY).kept


# The cache of target states


def cached_settings(tmp_path, **changes):
    options = {"states": "cached", "states_dir": str(tmp_path / "states"), "held_out": 0, "final_prompts": 0}
    return tiny_settings(tmp_path, **{**options, "max_steps": 1, **changes})


def assert_states_are_those_of(model, folder, records):
    cached, capture = CachedStates(folder), StateCapture(Target(model), [1, 3])
    for record in records:
        own = capture(torch.tensor([record.prompt_ids + record.response_ids])).taps[0]
        torch.testing.assert_close(cached[record.digest][0], own.bfloat16(), rtol=0.05, atol=0.05)


def test_a_second_run_reuses_the_states_of_the_same_texts_only(model, tmp_path):
    """Whatever the file is called and however its lines are keyed."""
    write(tmp_path / "data.jsonl", rows(1))
    train(cached_settings(tmp_path), target_model=model, log=ignore)
    before = (tmp_path / "states/index.json").stat().st_mtime_ns
    other = write(tmp_path / "other.jsonl", [{**row, "key": str(n)} for n, row in enumerate(rows(1)[::-1])])
    train(cached_settings(tmp_path, data=str(other), out=str(tmp_path / "run2")), target_model=model, log=ignore)
    assert (tmp_path / "states/index.json").stat().st_mtime_ns == before
    assert_states_are_those_of(model, tmp_path / "states", read(other))
    for seed, length in ((2, 20), (1, 12), (3, 30)):  # the same path and keys, other responses
        write(tmp_path / "data.jsonl", rows(seed, response=length))
        with pytest.raises(TrainingError, match="8 of the 8 records are not among its 8"):
            train(cached_settings(tmp_path, out=str(tmp_path / f"run{seed}{length}")), target_model=model, log=ignore)


def test_several_responses_to_a_prompt_have_their_own_states(model, tmp_path):
    data = write(tmp_path / "data.jsonl", rows(1), rows(2), rows(1))
    train(cached_settings(tmp_path), target_model=model, log=ignore)
    records = read(data)
    assert len(records) == 24 and len({record.digest for record in records}) == 16
    assert_states_are_those_of(model, tmp_path / "states", records)
    item = RecordDataset(records, CachedStates(tmp_path / "states"))[9]
    assert torch.equal(item["taps"], CachedStates(tmp_path / "states")[records[9].digest][0])


def changed_weights(model):
    model = copy.deepcopy(model)
    model.model.layers[2].mlp.up_proj.weight.data[7, 3] += 0.01
    return model


CHANGES = {
    "weights": (changed_weights, "weights '"),
    "dtype": (lambda model: copy.deepcopy(model).to(torch.bfloat16), "dtype 'torch.float32' .now 'torch.bfloat16'"),
    "config": (lambda model: tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "config '"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_states_of_another_target_under_the_same_name_are_rejected(model, tmp_path, change):
    write(tmp_path / "data.jsonl", rows(1))
    train(cached_settings(tmp_path), target_model=model, log=ignore)
    make, message = CHANGES[change]
    with pytest.raises(TrainingError, match=f"different target states: .*{message}"):
        train(cached_settings(tmp_path, out=str(tmp_path / "run2")), target_model=make(model), log=ignore)


def test_states_of_other_layers_or_without_last_states_are_rejected(model, tmp_path):
    target, records = Target(model), [Record("a", (5, 6), (7, 8, 9, 10))]
    build_state_cache(tmp_path, records, StateCapture(target, [1, 3]), describe_states(target, [1, 3], 64, 0))
    for layers, final, message in (([1, 4], 0, r"taps \[1, 3\] \(now \[1, 4\]\)"), ([1, 3], 32, "final_width 0")):
        with pytest.raises(TrainingError, match=message):
            build_state_cache(
                tmp_path, records, StateCapture(target, layers), describe_states(target, layers, 64, final)
            )


def test_a_fingerprint_depends_on_every_value_and_not_on_the_device(model):
    expected = weights_fingerprint(model)
    assert weights_fingerprint(copy.deepcopy(model)) == expected
    assert weights_fingerprint(cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))) == expected
    swapped = copy.deepcopy(model)
    rows_of = swapped.lm_head.weight.data
    rows_of[[3, 4]] = rows_of[[4, 3]]
    for other in (swapped, changed_weights(model), tiny_target(seed=1), copy.deepcopy(model).double()):
        assert weights_fingerprint(other) != expected
    with pytest.raises(TrainingError, match="on the meta device"):
        weights_fingerprint(copy.deepcopy(model).to("meta"))


def test_a_fingerprint_of_a_configuration_ignores_how_it_was_saved(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    built, saved = tiny_target().config, transformers.AutoConfig.from_pretrained(tmp_path)
    assert (saved.dtype, saved.architectures) != (built.dtype, built.architectures)
    assert config_fingerprint(saved) == config_fingerprint(built)
    saved.rms_norm_eps = 0.1
    assert config_fingerprint(saved) != config_fingerprint(built)


def test_only_shards_of_an_interrupted_run_are_overwritten(model, tmp_path):
    target, records = Target(model), [Record("a", (5, 6), (7, 8, 9, 10))]
    arguments = (records, StateCapture(target, [1, 3]), describe_states(target, [1, 3], 64, 0))
    build_state_cache(tmp_path / "interrupted", *arguments)
    (tmp_path / "interrupted/index.json").unlink()
    build_state_cache(tmp_path / "interrupted", *arguments)
    assert_states_are_those_of(model, tmp_path / "interrupted", records)
    for name, content in (("theirs", save_file), ("broken", lambda tensors, path: path.write_bytes(b"x" * 40))):
        (tmp_path / name).mkdir()
        shard = tmp_path / name / "shard-00000.safetensors"
        content({"weight": torch.ones(2)}, shard)
        before = shard.read_bytes()
        with pytest.raises(TrainingError, match="would be overwritten"):
            build_state_cache(tmp_path / name, *arguments)
        assert shard.read_bytes() == before
    for text in ("{}", "not JSON", "[1]"):
        (tmp_path / "theirs/index.json").write_text(text)
        with pytest.raises(TrainingError, match="not the index of cached target states"):
            build_state_cache(tmp_path / "theirs", *arguments)


# What the target does to its logits outside its head

DENSE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
OLD_NAMES = {"vocab_size": 96, "n_embd": 32, "n_layer": 6, "n_head": 4, "rotary_dim": 8, "n_positions": 256}
FAMILIES = {
    "Llama": DENSE,
    "Gemma2": {**DENSE, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "Granite": {**DENSE, "logits_scaling": 8.0},
    "Cohere": {**DENSE, "logit_scale": 0.0625},
    "FalconH1": {**DENSE, **MAMBA, "mamba_chunk_size": 16, "lm_head_multiplier": 0.1},
    "MiniCPM3": {**DENSE, **LATENT, "dim_model_base": 8, "num_key_value_heads": 4},
    "RecurrentGemma": {**DENSE, "lru_width": 32, "attention_window_size": 64, "logits_soft_cap": 0.5},
    "Phi": DENSE,
    "GPTJ": {**OLD_NAMES, "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False},
}


def family(name):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval().requires_grad_(False)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model


def kl(own, other):
    own, other = F.log_softmax(own, -1), F.log_softmax(other, -1)
    return float((own.exp() * (own - other)).sum(-1).mean())


@pytest.mark.parametrize("frequent", [None, torch.arange(40)], ids=["whole vocabulary", "loss_vocabulary"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_teacher_is_the_targets_own_distribution(tmp_path, name, frequent):
    model = family(name)
    target = Target(model)
    settings = tiny_settings(tmp_path, distillation=0.5, anchors=6, intermediate_size=64)
    objective = Objective(DFlashDraftModel(make_config(target, settings, 95)), target, settings, frequent)
    data = RecordDataset([Record(str(n), *map(tuple, torch.randint(2, 90, (2, 15)).tolist())) for n in range(2)])
    batch = collate([data[0], data[1]])
    with torch.no_grad():
        packed, states = objective._pack(batch, 0), objective._states(batch)
        loss_mask = packed.labels != IGNORED
        vocabulary = objective._vocabulary(packed.labels[loss_mask])
        taught = objective._teacher(states, packed, loss_mask, vocabulary)(slice(None)).float()
        before = packed.position_ids[:, packed.context_length :].view_as(loss_mask)[loss_mask] - 1
        at = loss_mask.nonzero()[:, 0], before
        own, head = model(batch["input_ids"]).logits[at].float(), target.head(states.final)[at]
    ids = slice(None) if vocabulary is None else vocabulary.ids
    assert kl(own[:, ids], taught) < 1e-6
    # The head alone teaches something else, except in targets that change nothing after it.
    assert (kl(own, head) > 1e-3) == (name not in ("Llama", "Phi", "GPTJ"))


class ChangedLlama(transformers.LlamaForCausalLM):
    """A Llama that changes its logits outside its head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


def llama_with(change, dtype=torch.float32):
    model = tiny_target().to(dtype)
    model.__class__, model.change = ChangedLlama, change
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("scale", "cap"),
    [(1, None), (0.0625, None), (0.03, None), (1.02, None), (7, None), (1, 30), (0.1, 50), (0.02, 15), (3, 0.5)],
)
def test_scale_and_cap_are_measured(scale, cap, dtype):
    def change(logits):
        logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    found = measure_logit_transform(Target(llama_with(change, dtype)))
    precision = 1e-5 if dtype == torch.float32 else 1e-2
    assert found.scale == pytest.approx(scale, rel=precision)
    assert found.cap == (None if cap is None else pytest.approx(cap, rel=precision))
    if (scale, cap) == (1, None):
        assert found == LogitTransform()


def without_token(logits):
    logits[..., 5] = torch.finfo(logits.dtype).min
    return logits


STRANGE = {
    "a token masked": without_token,
    "a hard limit": lambda logits: logits.clamp(-3, 3),
    "shifted per token": lambda logits: logits + torch.linspace(-1, 1, logits.shape[-1]),
    "by position": lambda logits: logits * torch.linspace(0.5, 1, logits.shape[1])[:, None],
    "fewer tokens": lambda logits: logits[..., :-1],
    "infinite": lambda logits: logits / 0,
    "constant": torch.zeros_like,
}


@pytest.mark.parametrize("name", STRANGE)
def test_distillation_is_rejected_for_logits_that_the_head_does_not_give(tmp_path, name):
    write_records(tmp_path / "data.jsonl")
    model = llama_with(STRANGE[name])
    with pytest.raises(TrainingError, match="distillation is not supported for .*ChangedLlama"):
        train(tiny_settings(tmp_path, distillation=0.5), target_model=model, log=ignore)
    assert not (tmp_path / "run").exists()
    target = Target(model)
    settings = tiny_settings(tmp_path)
    Objective(DFlashDraftModel(make_config(target, settings, 95)), target, settings, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0.0, 1.0, 20.0])
def test_the_rows_of_a_reduced_vocabulary_include_the_bias(tmp_path, dtype, size):
    """The weight must not drown in the rounding of the bias: in bfloat16, 20 has a step of 0.125."""
    model = family("Phi")
    torch.manual_seed(0)
    torch.nn.init.normal_(model.lm_head.bias, std=size)
    target = Target(model.to(dtype))
    settings = tiny_settings(tmp_path, intermediate_size=64)
    draft = DFlashDraftModel(make_config(target, settings, 95))
    ids = torch.arange(0, 90, 3)
    objective = Objective(draft, target, settings, ids)
    hidden = torch.randn(7, 32)
    vocabulary = objective._vocabulary(torch.tensor([4, 5]))
    assert vocabulary.ids.tolist() == sorted({*ids.tolist(), 4, 5})
    expected = draft.compute_logits(hidden, target.head)[:, vocabulary.ids]
    found, tolerance = objective._logits(hidden, vocabulary), 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weight, _ = objective._head_rows
    torch.testing.assert_close(weight, model.lm_head.weight, rtol=0.01, atol=1e-3)


# The split


def texts(records):
    return {record.prompt_ids + record.response_ids for record in records}


@pytest.mark.parametrize("second", [2, 1], ids=["two responses per prompt", "the file twice"])
def test_all_responses_to_a_prompt_are_on_one_side(tmp_path, second):
    records = read(write(tmp_path / "d.jsonl", rows(1, 40), rows(second, 40)))
    for held_out, wanted in ((8, 8), (7, 8), (1, 2), (0, 0)):
        for seed in range(5):
            training, held = split(records, held_out, seed)
            assert len(held) == wanted and len(training) == 80 - wanted
            assert not {r.prompt_ids for r in training} & {r.prompt_ids for r in held}
    assert split(records, 8, 0)[1] != split(records, 8, 1)[1]
    with pytest.raises(TrainingError, match=r"only 80, to 40 prompts.*lower `held_out`"):
        split(records, 79, 0)


# Resumed runs


def interrupt_at(step):
    """StopOnInterrupt with a real Ctrl-C sent to this process during a step."""

    class Interrupted(trainer_module.StopOnInterrupt):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step - 1:
                os.kill(os.getpid(), signal.SIGINT)

    return Interrupted


@pytest.fixture
def interrupted(model, tmp_path, monkeypatch):
    """A run over 10 records, stopped after the first of two epochs. Returns its settings."""
    write(tmp_path / "data.jsonl", rows(1, 10))
    settings = tiny_settings(tmp_path, max_steps=8, save_every=4, evaluate_every=4, final_prompts=0)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "StopOnInterrupt", interrupt_at(4))
        assert train(settings, target_model=model, log=ignore).steps == 4
    return settings


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_run_resumed_after_the_data_grew_keeps_its_records(model, tmp_path, interrupted):
    """It trains on the same records in the same order as a run on the data as they were, and says so."""
    whole = replace(interrupted, out=str(tmp_path / "whole"))
    train(whole, target_model=model, log=ignore)
    held_out = (tmp_path / "run/held_out.json").read_text()
    write(tmp_path / "data.jsonl", rows(1, 10), rows(5, 20, prompts=7))
    messages = []
    assert train(interrupted, resume=True, target_model=model, log=messages.append).steps == 8
    assert any("continues with its 10 records, the 20 new ones are not used" in line for line in messages)
    assert any("8 training records, 2 held out" in line for line in messages)
    assert (tmp_path / "run/held_out.json").read_text() == held_out
    expected, found = weights(tmp_path / "whole/checkpoint-8"), weights(tmp_path / "run/checkpoint-8")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


CHANGED_DATA = {
    "shuffled": rows(1, 10)[::-1],
    "fewer": rows(1, 9),
    "other responses": rows(2, 10),
    "one token": [*rows(1, 9), {**rows(1, 10)[9], "response_ids": [2, *rows(1, 10)[9]["response_ids"][1:]]}],
    "a line in front": [*rows(3, 1, prompts=9), *rows(1, 10)],
}


@pytest.mark.parametrize("change", CHANGED_DATA)
def test_a_run_is_not_resumed_with_other_records(model, tmp_path, interrupted, change):
    assert read(write(tmp_path / "changed.jsonl", CHANGED_DATA[change])) != read(tmp_path / "data.jsonl")
    write(tmp_path / "data.jsonl", CHANGED_DATA[change])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(TrainingError, match="started with 10 records, and these are not the first of the"):
        train(interrupted, resume=True, target_model=model, log=ignore)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize("content", [None, '{"held_out": ["prompt3", "prompt5"]}', "{"])
def test_a_run_that_does_not_record_its_data_is_not_resumed(model, tmp_path, interrupted, content):
    path = tmp_path / "run/held_out.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(TrainingError, match="does not record what the run was started with"):
        train(interrupted, resume=True, target_model=model, log=ignore)
