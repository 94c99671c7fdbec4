"""Exactness of `generate` on targets with recurrent, convolution and mixed layers: family x pattern x mode."""

import pytest
import torch
from families import FAMILIES, REFUSED, SERVED
from lossless import MODES, PATTERNS, assert_same, assert_varied, both, prompt
from oracle import fixed, oracle_draft, randomly
from transformers import DynamicCache

from hf_dflash.draft.errors import DFlashError

NEW = 32
RECURRENT = [name for name in SERVED if FAMILIES[name].recurrent]
_built: dict[str, torch.nn.Module] = {}


def target_of(name: str):
    """Return a family's target, built once for this module."""
    if name not in _built:
        _built[name] = FAMILIES[name].build(0)
    return _built[name]


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("pattern", "mode"), [*((pattern, "greedy") for pattern in PATTERNS), ("random", "sampled"), ("all", "sampled")]
)
@pytest.mark.parametrize("name", RECURRENT)
def test_every_family_and_acceptance_pattern(name, pattern, mode):
    target = target_of(name)
    pair = both(target, {"inputs": prompt()}, PATTERNS[pattern], max_new_tokens=NEW, **MODES[mode])
    assert_varied(pair.plain, NEW)
    assert_same(pair)
    assert hooks_of(target) == 0
    if pattern.startswith("fixed"):
        # All rounds accept what the pattern says, except the last, which the maximum length may cut.
        assert set(pair.statistics.accepted[:-1]) == {int(pattern[-1])}


#: One family of each cache kind.
CONTINUED = {"qwen3_5", "kimi_linear", "lfm2", "mamba2", "falcon_h1"}


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "kimi_linear", "lfm2", "bamba", "falcon_h1"])
def test_prompts_and_blocks_of_every_size(name, length, block_size):
    pattern = randomly(length, block_size - 1)
    pair = both(
        target_of(name), {"inputs": prompt(length)}, pattern, block_size=block_size, max_new_tokens=NEW, do_sample=False
    )
    assert_same(pair)


@pytest.mark.parametrize("name", [name for name in RECURRENT if name in CONTINUED])
class TestTheCache:
    def test_a_second_turn_on_the_returned_cache(self, name):
        """With and without a draft in each of two turns: all four combinations give one text."""
        if name == "mamba2":
            pytest.skip("no layer counts tokens, so plain generate cannot continue such a cache either")
        target = target_of(name)
        texts = {self.two_turns(target, first, second) for first in (False, True) for second in (False, True)}
        assert len(texts) == 1

    def test_plain_generate_is_unchanged_afterward(self, name):
        target = target_of(name)
        before = target.generate(prompt(), max_new_tokens=16, do_sample=False)
        both(target, {"inputs": prompt()}, fixed(2), max_new_tokens=16, do_sample=False)
        assert target.generate(prompt(), max_new_tokens=16, do_sample=False).tolist() == before.tolist()

    def two_turns(self, target, draft_in_first: bool, draft_in_second: bool) -> tuple[int, ...]:
        plain = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        ids, cache = prompt(), None
        for turn, drafted in enumerate((draft_in_first, draft_in_second)):
            reference = target.generate(ids, max_new_tokens=12, do_sample=False)
            more = {"assistant_model": oracle_draft(target, reference, fixed(2))} if drafted else {}
            if cache is not None:
                more[self.keyword(target)] = cache
            outputs = target.generate(ids, **plain, **more)
            cache = outputs[self.keyword(target)]
            ids = torch.cat([outputs.sequences, prompt(5, seed=turn + 1)], dim=1)
        return tuple(ids[0].tolist())

    @staticmethod
    def keyword(target) -> str:
        outputs = target.generate(prompt(), max_new_tokens=1, return_dict_in_generate=True, do_sample=False)
        return next(key for key, value in outputs.items() if isinstance(value, DynamicCache))


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_tapped_or_continued_are_refused_before_the_first_token(name, record_property):
    target = target_of(name)
    draft = oracle_draft(target, prompt(), fixed(1))
    with pytest.raises(DFlashError, match="cache_params|residual streams") as refusal:
        target.generate(prompt(), assistant_model=draft, max_new_tokens=4, do_sample=False)
    record_property("refused", str(refusal.value))
    assert draft.rounds == 0
    assert hooks_of(target) == 0
