"""Exactness of the rollback, independent of the decoding loop.

Every family reads the same text in blocks with a corrupted rejected part, for every number of accepted tokens. The
logits of the accepted tokens must equal those of plain one-token decoding, and two different patterns must leave equal
caches.
"""

import random

import pytest
import torch
from families import FAMILIES
from rollback import cycle, decode_plainly, largest_differences, read_in_blocks
from torch import nn

from hf_dflash.target.cache import TargetCache
from hf_dflash.target.cache.recurrent import RecurrentLayer

NEW = 36
#: Prompt lengths: one token, below and at the convolution width, medium, longer than windows and chunks (8 and 64).
PROMPTS = [1, 3, 4, 11, 70]
#: fp32 sums in a different order differ by a relative 1e-7, which the large random weights amplify to at most 4e-5 of
#: the largest logit. A state of another position differs by as much as the largest logit itself.
ROUNDING = 2e-4
EXACT = list(FAMILIES)
RECURRENT = [name for name in EXACT if FAMILIES[name].recurrent]
_models: dict[str, nn.Module] = {}
_texts: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}


def model_of(name: str):
    """Return a family's target, built once for this module."""
    if name not in _models:
        _models[name] = FAMILIES[name].build(0)
    return _models[name]


def text_of(name: str, length: int):
    """Return a prompt of `length` tokens with its plain greedy text, and the logits."""
    if (name, length) not in _texts:
        prompt = torch.randint(5, 300, (1, length), generator=torch.Generator().manual_seed(length))
        _texts[name, length] = decode_plainly(model_of(name), prompt, NEW)
    return _texts[name, length]


def assert_exact(name: str, length: int, block_size: int, kept, commit=None) -> object:
    """Read the family's text in blocks, compare the logits and return the final cache."""
    text, logits = text_of(name, length)
    outputs, cache = read_in_blocks(model_of(name), text, length, block_size, kept, commit)
    error = float((outputs - logits).abs().max() / logits.abs().max())
    assert error < ROUNDING, f"logits differ by {error:.1e} of the largest"
    return cache


def random_kept(block_size: int, seed: int):
    """Yield random numbers of accepted tokens forever."""
    generator = random.Random(seed)
    while True:
        yield generator.randint(1, block_size)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kept", [range(1, 9), range(8, 0, -1), [1], [7]], ids=["rising", "falling", "1", "7"])
def test_every_number_of_accepted_tokens(name, kept):
    assert_exact(name, 11, 8, cycle(kept))


@pytest.mark.parametrize(
    ("name", "length"),
    [(name, length) for name in EXACT for length in (PROMPTS if name in RECURRENT else (1, 70))],
)
def test_prompts_of_every_length_with_random_acceptance(name, length):
    for block_size in (4, 8, 16):
        assert_exact(name, length, block_size, random_kept(block_size, seed=length))


@pytest.mark.parametrize("name", EXACT)
def test_two_patterns_leave_equal_caches(name, record_property, length=70):
    one = assert_exact(name, length, 8, cycle([1]))
    other = assert_exact(name, length, 16, random_kept(16, seed=5))
    differences = largest_differences(one, other)
    scale = float(text_of(name, length)[1].abs().max())
    for kind, value in differences.items():
        record_property(kind, value)
    # Recurrent states are sums over all tokens and larger than a logit, so allow ten times the tolerance.
    assert all(value < 10 * ROUNDING * scale for value in differences.values()), differences


def skip_replay(target_cache: TargetCache, kept: torch.Tensor, verified: int) -> None:
    """A deliberate bug: attention layers roll back, but recurrent layers keep the whole block."""
    for layer in target_cache._block_layers:
        if isinstance(layer, RecurrentLayer):
            layer.begin_block()
        else:
            layer.commit(kept.tolist(), verified)


@pytest.mark.parametrize("name", [name for name in RECURRENT if "hybrid" not in FAMILIES[name].kinds])
def test_negative_control_without_the_replay_the_text_is_wrong(name):
    with pytest.raises(AssertionError, match="logits differ"):
        assert_exact(name, 11, 8, cycle([3, 1, 8, 5]), commit=skip_replay)


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_negative_control_one_entry_too_many(name):
    """Attention layers that keep one rejected token are detected too."""

    def keep_one_more(target_cache, kept, verified):
        TargetCache.commit(target_cache, (kept + 1).clamp(max=verified), verified)

    with pytest.raises(AssertionError):
        assert_exact(name, 11, 8, cycle([3, 1, 8, 5]), commit=keep_one_more)
