"""Mixed dtypes: what a target of any dtype passes to its draft and gets back."""

import pytest
import torch
from families import FAMILIES
from lossless import both, prompt
from oracle import all_right, oracle_draft, randomly
from tiny_drafts import tiny_draft
from torch import nn

from hf_dflash import DraftDtypeError, compare
from hf_dflash.target.target import Target

BLOCK = 6
GREEDY = {"max_new_tokens": 24, "do_sample": False}
TARGET_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DRAFT_DTYPES = [torch.float32, torch.bfloat16]
MIXED = [(t, d) for t in TARGET_DTYPES for d in DRAFT_DTYPES if t != d]


def target_in(dtype: torch.dtype, family: str = "qwen3"):
    return FAMILIES[family].build(0).to(dtype)


def draft_in(dtype: torch.dtype, **shape):
    return tiny_draft(vocab_size=384, block_size=BLOCK, **shape).to(dtype)


# --- pairs


@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft_dtype", DRAFT_DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", TARGET_DTYPES, ids=str)
def test_every_pair_of_dtypes_runs_and_keeps_the_text(target_dtype, draft_dtype, options):
    target = target_in(target_dtype)
    torch.manual_seed(0)
    text = target.generate(prompt(), **options)
    draft = oracle_draft(target, text, randomly(3, BLOCK - 1), block_size=BLOCK, strict=target_dtype is torch.float32)
    draft.to(draft_dtype)
    statistics = []
    comparison = compare(target, draft, prompt(), seed=0, stats=statistics.append, **options)
    assert comparison.same or (target_dtype is not torch.float32 and comparison.within_tolerance), comparison
    assert len(set(statistics[0].accepted)) > 2
    assert draft.dtype is draft_dtype


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_real_proposal_of_a_bfloat16_draft_for_a_float16_target(family, version):
    target, draft = target_in(torch.float16, family), draft_in(torch.bfloat16, version=version)
    comparison = compare(target, draft, prompt(), **GREEDY)
    assert comparison.same or comparison.within_tolerance, comparison


@pytest.mark.parametrize("target_dtype", TARGET_DTYPES, ids=str)
def test_a_float16_draft_is_rejected(target_dtype):
    with pytest.raises(DraftDtypeError, match="bfloat16"):
        draft_in(torch.float32).to(torch.float16)
    draft = draft_in(torch.float32)
    for parameter in draft.parameters():  # bypasses the check on module casts
        parameter.data = parameter.data.half()
    with pytest.raises(DraftDtypeError, match="bfloat16"):
        target_in(target_dtype).generate(prompt(), assistant_model=draft, **GREEDY)


# --- the three casts


def inputs_seen_by(module: nn.Module) -> list[torch.dtype]:
    """Record the dtype of the first input of every later call."""
    seen = []
    module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    return seen


@pytest.mark.parametrize("target_dtype, draft_dtype", MIXED, ids=str)
def test_taps_enter_in_the_drafts_dtype(target_dtype, draft_dtype):
    draft = draft_in(draft_dtype)
    seen = inputs_seen_by(draft.fc)
    target_in(target_dtype).generate(prompt(), assistant_model=draft, **GREEDY)
    assert set(seen) == {draft_dtype}


@pytest.mark.parametrize("target_dtype, draft_dtype", MIXED, ids=str)
def test_block_embeddings_enter_in_the_drafts_dtype(target_dtype, draft_dtype):
    draft = draft_in(draft_dtype)
    seen = inputs_seen_by(draft.layers[0].input_layernorm)
    target_in(target_dtype).generate(prompt(), assistant_model=draft, **GREEDY)
    assert set(seen) == {draft_dtype}


@pytest.mark.parametrize("shape", [{}, {"version": 2}, {"own_embeddings": True}], ids=["dflash", "dflash2", "own"])
@pytest.mark.parametrize("target_dtype, draft_dtype", MIXED, ids=str)
def test_the_drafts_output_reaches_the_head_in_the_targets_dtype(target_dtype, draft_dtype, shape):
    # With embeddings of its own, the draft sees nothing in the target's dtype.
    target, draft = target_in(target_dtype), draft_in(draft_dtype, **shape)
    seen = inputs_seen_by(target.lm_head)
    target.generate(prompt(), assistant_model=draft, **GREEDY)
    assert set(seen) == {target_dtype}


def test_own_embeddings_and_an_own_head_need_no_cast_to_the_targets_dtype():
    draft = draft_in(torch.bfloat16, own_embeddings=True, draft_vocab_size=64)
    target = target_in(torch.float16)
    seen = inputs_seen_by(draft.lm_head)
    comparison = compare(target, draft, prompt(), **GREEDY)
    assert comparison.same or comparison.within_tolerance, comparison
    assert set(seen) == {torch.bfloat16}


def test_a_float16_target_gives_the_draft_what_a_float32_target_gives():
    # Both are rounded to bfloat16 once from the same values, so the draft's output is bitwise equal.
    draft = draft_in(torch.bfloat16)
    embeds, taps = (torch.randn(1, n, width).half() for n, width in ((BLOCK, 64), (5, 128)))
    from_half = draft(noise_embeds=embeds, context_hidden_states=taps).last_hidden_state
    from_float = draft(noise_embeds=embeds.float(), context_hidden_states=taps.float()).last_hidden_state
    assert from_half.dtype is torch.float16
    assert torch.equal(from_half, from_float.half())


# --- embedding and head are called, their weights never read


class Sealed(nn.Module):
    """An embedding or head that can be called, but whose weight cannot be read, like a quantized one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self._call = [inner]  # in a list, so that it is not registered as a submodule

    def __getattr__(self, name: str):
        if name == "weight":
            raise AssertionError("the weight was read")
        return super().__getattr__(name)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._call[0](inputs)


@pytest.mark.parametrize("dtype", TARGET_DTYPES, ids=str)
def test_embedding_and_head_are_called_and_never_read(dtype):
    target = target_in(dtype)
    target.set_input_embeddings(Sealed(target.get_input_embeddings()))
    target.set_output_embeddings(Sealed(target.get_output_embeddings()))
    pair = both(target, {"inputs": prompt()}, randomly(2, 5), **GREEDY)
    assert pair.ours.tolist() == pair.plain.tolist()


def test_a_head_with_soft_cap_and_scaled_embeddings_in_float16():
    target = target_in(torch.float16, "gemma2")
    seen = inputs_seen_by(Target(target)._output_head)
    text = target.generate(prompt(), **GREEDY)
    draft = oracle_draft(target, text, all_right, block_size=BLOCK, strict=False, final_logit_softcapping=30.0)
    comparison = compare(target, draft.to(torch.bfloat16), prompt(), **GREEDY)
    assert comparison.same or comparison.within_tolerance, comparison
    assert set(seen) == {torch.float16}
