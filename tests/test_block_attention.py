"""Attention of a verified block: same values as transformers' function, no copy of the context, inactive outside
blocks.
"""

import contextlib
import threading

import pytest
import torch
from families import FAMILIES
from transformers import AttentionInterface

from hf_dflash.target import block_attention
from hf_dflash.target.block_attention import grouped_attention


class Module:
    """The attributes of an attention module that transformers' function uses."""

    is_causal = True
    training = False

    def __init__(self, groups):
        self.num_key_value_groups = groups


def inputs(key_heads=2, groups=3, n=5, keys=37, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    mask = torch.ones(n, keys, dtype=torch.bool).tril(keys - n)
    mask[:, :4] = False
    buffers = random(2, key_heads, keys + 9, 16), random(2, key_heads, keys + 9, 16)
    return random(2, key_heads * groups, n, 16), *(b[:, :, :keys] for b in buffers), mask.expand(2, 1, n, keys)


def plain_attention(groups, query, key, value, mask, **kwargs):
    return AttentionInterface()["sdpa"](Module(groups), query, key, value, mask, **kwargs)[0]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("groups", [2, 3, 8])
def test_equal_to_transformers_function(groups, additive):
    query, key, value, mask = inputs(groups=groups)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = plain_attention(groups, query, key, value, mask, scaling=0.3)
    result = grouped_attention(query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_negative_control_shuffled_query_heads_differ():
    """Shuffling the heads changes the values."""
    query, key, value, mask = inputs()
    expected = plain_attention(3, query, key, value, mask, scaling=0.3)
    result = grouped_attention(query[:, [0, 2, 4, 1, 3, 5]], key, value, mask, scaling=0.3)
    assert (result - expected).abs().max() > 0.1


@pytest.fixture
def calls(monkeypatch):
    """One entry per call of the grouped attention."""
    calls = []
    grouped = block_attention.grouped_attention
    monkeypatch.setattr(block_attention, "grouped_attention", lambda *a: (calls.append(1), grouped(*a))[1])
    return calls


def test_it_is_only_active_inside_a_block(calls):
    query, key, value, mask = inputs()
    outside = plain_attention(3, query, key, value, mask)
    assert not calls
    with block_attention.block_attention():
        inside = plain_attention(3, query, key, value, mask)
        elsewhere = []
        other = threading.Thread(target=lambda: elsewhere.append(plain_attention(3, query, key, value, mask)))
        other.start()
        other.join()
    assert len(calls) == 1
    torch.testing.assert_close(inside, outside, rtol=1e-5, atol=1e-6)
    assert torch.equal(elsewhere[0], outside)


def test_unsupported_arguments_go_to_transformers(calls):
    query, key, value, mask = inputs()
    with block_attention.block_attention():
        plain_attention(3, query[:, :, :1], key, value, mask[:, :, :1])
        plain_attention(1, query[:, :2], key, value, mask)
        plain_attention(3, query, key, value, None)
        plain_attention(3, query, key, value, mask.expand(2, 6, 5, 37))
        # Newer transformers versions reject a softcap here, older ones ignore it; either way the call is passed on.
        with contextlib.suppress(ValueError):
            plain_attention(3, query, key, value, mask, softcap=30.0)
    assert not calls


def test_a_verify_forward_of_a_target_uses_it(calls):
    from lossless import assert_same, both, prompt
    from oracle import randomly

    target = FAMILIES["llama"].build(0)
    assert target.config._attn_implementation == "sdpa"
    # The first call with a target also probes it with a block.
    for _ in range(2):
        calls.clear()
        pair = both(target, {"inputs": prompt()}, randomly(1, 5), max_new_tokens=20, do_sample=False)
    assert_same(pair)
    full_rounds = sum(proposed > 0 for proposed in pair.statistics.proposed)
    assert len(calls) == full_rounds * target.config.num_hidden_layers


def test_installing_twice_wraps_once():
    before = AttentionInterface()["sdpa"]
    block_attention.install()
    assert AttentionInterface()["sdpa"] is before


@pytest.mark.parametrize("keys", [3, 5, 9])
def test_a_block_without_a_mask_sees_all_of_an_image_as_single_tokens_do(keys):
    """transformers' function is causal for several queries without a mask, and cuts off keys beyond their number."""
    query, key, value, _ = inputs(n=5, keys=keys)
    singly = torch.cat([plain_attention(3, query[:, :, i : i + 1], key, value, None) for i in range(5)], dim=1)
    with block_attention.block_attention():
        assert torch.allclose(plain_attention(3, query, key, value, None), singly, atol=1e-6)
    assert not torch.allclose(plain_attention(3, query, key, value, None), singly, atol=1e-2), "nothing to correct"
