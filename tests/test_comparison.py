"""`compare`: the first difference, its margin, and whether the target's own rounding error explains it."""

import pytest
import torch
from families import FAMILIES
from lossless import prompt
from oracle import oracle_draft, randomly

from hf_dflash import UnsupportedOptionError, compare
from hf_dflash.decoding.comparison import compare_texts
from hf_dflash.target.cache import TargetCache

NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 0}
INPUTS = {"input_ids": prompt(), "attention_mask": torch.ones_like(prompt())}
MODES = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.fixture
def target():
    return FAMILIES["qwen3"].build(0)


def plain_text(target, options: dict, seed: int = 0) -> torch.LongTensor:
    torch.manual_seed(seed)
    return target.generate(prompt(), **options)[0]


def spoiled(ids: torch.LongTensor, position: int, token: int | None = None) -> torch.LongTensor:
    """The text with a different token at one position."""
    other = ids.clone()
    other[position] = (other[position] + 1) % 300 if token is None else token
    return other


@pytest.mark.parametrize("mode", MODES)
def test_the_same_text(target, mode):
    text = plain_text(target, MODES[mode])
    state = torch.get_rng_state()
    result = compare(target, oracle_draft(target, text[None], randomly(1, 5)), prompt(), seed=0, **MODES[mode])
    assert (result.same, result.length, result.margin, result.dtype) == (True, NEW, None, "float32")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_difference_has_the_margin_of_plain_generate(target):
    ids = plain_text(target, GREEDY)
    position = prompt().shape[1] + 7
    result = compare_texts(target, INPUTS, ids, spoiled(ids, position), **GREEDY)
    best, second = target(ids[None, :position]).logits[0, -1].topk(2).values.tolist()
    assert result.first_difference == 7
    assert result.margin == pytest.approx(best - second, abs=1e-4)
    assert 0 < result.bound < 1e-3 < result.margin
    assert not result.within_tolerance


def test_a_difference_of_sampled_texts_has_the_margin_of_the_draw(target):
    ids = plain_text(target, SAMPLED, seed=5)
    position = prompt().shape[1] + 7
    result = compare_texts(target, INPUTS, ids, spoiled(ids, position), seed=5, **SAMPLED)
    assert result.first_difference == 7
    assert result.margin > result.bound > 0
    assert not result.within_tolerance
    # With another seed plain generate draws different tokens, so the margin is unknown.
    assert compare_texts(target, INPUTS, ids, spoiled(ids, position), seed=6, **SAMPLED).margin is None


def test_a_tie_is_within_tolerance(target):
    ids = plain_text(target, GREEDY)
    position = prompt().shape[1] + 7
    twin = 383
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[int(ids[position])]
    result = compare_texts(target, INPUTS, ids, spoiled(ids, position, twin), **GREEDY)
    assert (result.first_difference, result.margin, result.within_tolerance) == (7, 0.0, True)


def test_a_pad_token_in_the_text_is_treated_like_any_other(target):
    ids = plain_text(target, GREEDY)
    target.generation_config.pad_token_id = int(ids[-4])
    result = compare_texts(target, INPUTS, ids, spoiled(ids, len(ids) - 1), **GREEDY)
    assert result.bound < 1e-3


def test_stopping_earlier_is_not_within_tolerance(target):
    ids = plain_text(target, GREEDY)
    result = compare_texts(target, INPUTS, ids, ids[:-3], **GREEDY)
    assert (result.first_difference, result.margin, result.within_tolerance) == (NEW - 3, None, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rollback_bug_is_not_mistaken_for_rounding(monkeypatch, dtype):
    target = FAMILIES["qwen3"].build(0).to(dtype)
    draft = oracle_draft(target, plain_text(target, GREEDY)[None], randomly(1, 5))
    # The oracle fails once the text leaves its reference; here it may guess instead.
    monkeypatch.setattr(
        type(draft), "propose", lambda self, hidden, anchor_ids, head: hidden.new_full((1, 7), 5).long()
    )
    commit = TargetCache.commit

    def too_much(self, kept, verified):
        commit(self, (kept + 1).clamp(max=verified), verified)

    monkeypatch.setattr(TargetCache, "commit", too_much)
    result = compare(target, draft, prompt(), **GREEDY)
    assert not result.same
    assert not result.within_tolerance


def test_a_batch_is_refused(target):
    ids = prompt().repeat(2, 1)
    draft = oracle_draft(target, target.generate(ids, **GREEDY), randomly(1, 5))
    with pytest.raises(UnsupportedOptionError, match="2 texts"):
        compare(target, draft, ids, **GREEDY)
