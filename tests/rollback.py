"""Verifying spoiled blocks on a `TargetCache`, without the decoding loop.

Owns: plain one-token decoding as the reference, the same text read in blocks of which a prefix is committed, the
comparison of two final caches.

Does not know: families, drafts, `generate`.
"""

import inspect
from collections.abc import Iterable, Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_dflash.target.cache import TargetCache

#: Names of the cache argument: the first since transformers 5.24, the others before.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


@torch.no_grad()
def forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, **inputs) -> torch.Tensor:
    """Logits `(batch, n, vocab)` of one forward that reads `ids` behind what is in `cache`."""
    accepted = inspect.signature(model.forward).parameters
    name = next(name for name in CACHE_ARGUMENTS if name in accepted)
    if "position_ids" in accepted:
        # Some families count from 0 in every forward unless they are told; `generate` tells them.
        start = cache.get_seq_length()
        inputs["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
    return model(input_ids=ids, use_cache=True, **{name: cache}, **inputs).logits


def decode_plainly(model: PreTrainedModel, prompt: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy one-token decoding.

    Returns:
        the prompt and `steps` tokens `(1, len + steps)`, and the logits `(steps, vocab)` that chose them.
    """
    cache = DynamicCache(config=model.config)
    text, chosen_by, read = prompt, [], prompt
    for _ in range(steps):
        logits = forward(model, read, cache)[:, -1]
        chosen_by.append(logits[0])
        read = logits.argmax(-1, keepdim=True)
        text = torch.cat([text, read], dim=1)
    return text, torch.stack(chosen_by)


def spoiled(block: torch.Tensor, kept: int, vocab: int) -> torch.Tensor:
    """The block `(1, n)` with every token behind the first `kept` replaced by another one."""
    wrong = block.clone()
    wrong[:, kept:] = (wrong[:, kept:] + 1 + torch.arange(block.shape[1] - kept)) % vocab
    return wrong


def read_in_blocks(
    model: PreTrainedModel, text: torch.Tensor, prompt_length: int, block_size: int, kept: Iterator[int], commit=None
) -> tuple[torch.Tensor, DynamicCache]:
    """Read `text` as a speculative loop would: prefill, then blocks of which the first `kept` tokens are right.

    Args:
        kept: how many tokens of each block are right and committed, 1 to `block_size`.
        commit: replaces `TargetCache.commit`, for a deliberate fault.

    Returns:
        logits `(len - prompt_length, vocab)` that predict the tokens behind the prompt, and the cache, released.
    """
    cache = DynamicCache(config=model.config)
    length = text.shape[1]
    with TargetCache(cache, model, max_length=length, block_size=block_size) as target_cache:
        seen = [forward(model, text[:, :prompt_length], cache)[0, -1:]]
        position = prompt_length
        while position < length - 1:
            # The block starts with the token at `position`, whose logits came from the round before.
            block = text[:, position : min(position + block_size, length - 1)]
            count = min(next(kept), block.shape[1])
            target_cache.begin_block()
            logits = forward(model, spoiled(block, count, model.config.get_text_config().vocab_size), cache)
            (commit or TargetCache.commit)(target_cache, torch.tensor([count]), block.shape[1])
            seen.append(logits[0, :count])
            position += count
        assert target_cache.get_seq_length() in (length - 1, None)
    return torch.cat(seen), cache


def cycle(values: Iterable[int]) -> Iterator[int]:
    """The values again and again."""
    values = list(values)
    while True:
        yield from values


def states(cache: DynamicCache) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a released cache holds, with the kind of state it is."""
    for layer in cache.layers:
        for kind in ("keys", "values"):
            state = getattr(layer, kind, None)
            if state is not None:
                yield kind, state
        for kind in ("conv_states", "recurrent_states"):
            for state in getattr(layer, kind, {}).values():
                if state is not None:
                    yield kind, state


def largest_differences(one: DynamicCache, other: DynamicCache) -> dict[str, float]:
    """The largest absolute difference of two caches by kind of state; shapes must agree."""
    result: dict[str, float] = {}
    for (kind, a), (_, b) in zip(states(one), states(other), strict=True):
        assert a.shape == b.shape, f"{kind}: {tuple(a.shape)} and {tuple(b.shape)}"
        result[kind] = max(result.get(kind, 0.0), float((a.float() - b.float()).abs().max()) if a.numel() else 0.0)
    return result
