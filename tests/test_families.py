"""The tiny targets themselves: reproducible from a seed, with text varied enough to expose bugs."""

import pytest
import torch
from families import FAMILIES, RECURRENT_FAMILIES
from rollback import decode_plainly

NEW = 48


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_varied_and_not_periodic(name):
    text, _ = decode_plainly(FAMILIES[name].build(0), torch.arange(20, 27)[None], NEW)
    new = text[0, 7:].tolist()
    assert len(set(new)) >= 24, f"only {len(set(new))} distinct tokens in {NEW}"
    assert not any(new[-2 * period : -period] == new[-period:] for period in range(1, NEW // 2 + 1))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(name):
    one, same, other = (FAMILIES[name].build(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_every_kind_of_recurrent_layer_is_covered():
    kinds = {kind for family in RECURRENT_FAMILIES.values() for kind in family.kinds}
    assert kinds >= {"delta", "kda", "conv", "mamba", "mamba2", "hybrid"}
