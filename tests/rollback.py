"""Run corrupted blocks through a `TargetCache` without the decoding loop, and compare with plain one-token decoding."""

import inspect
from collections.abc import Iterable, Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_dflash.target.cache import TargetCache

#: Names of the cache argument: the first since transformers 5.24, the others before.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


@torch.no_grad()
def forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, **inputs) -> torch.Tensor:
    """Return the logits `(batch, n, vocab)` of one forward over `ids` after what is in `cache`."""
    accepted = inspect.signature(model.forward).parameters
    name = next(name for name in CACHE_ARGUMENTS if name in accepted)
    if "position_ids" in accepted:
        # Some families count from 0 in every forward unless they receive positions, as `generate` passes them.
        start = cache.get_seq_length()
        inputs["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
    return model(input_ids=ids, use_cache=True, **{name: cache}, **inputs).logits


def decode_plainly(model: PreTrainedModel, prompt: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode greedily, one token at a time.

    Returns:
        the prompt and `steps` tokens `(1, len + steps)`, and the logits `(steps, vocab)` that predicted them.
    """
    cache = DynamicCache(config=model.config)
    text, all_logits, read = prompt, [], prompt
    for _ in range(steps):
        logits = forward(model, read, cache)[:, -1]
        all_logits.append(logits[0])
        read = logits.argmax(-1, keepdim=True)
        text = torch.cat([text, read], dim=1)
    return text, torch.stack(all_logits)


def corrupted(block: torch.Tensor, kept: int, vocab: int) -> torch.Tensor:
    """Return the block `(1, n)` with every token after the first `kept` replaced by a different one."""
    wrong = block.clone()
    wrong[:, kept:] = (wrong[:, kept:] + 1 + torch.arange(block.shape[1] - kept)) % vocab
    return wrong


def read_in_blocks(
    model: PreTrainedModel, text: torch.Tensor, prompt_length: int, block_size: int, kept: Iterator[int], commit=None
) -> tuple[torch.Tensor, DynamicCache]:
    """Read `text` as a speculative loop would: prefill, then blocks whose first `kept` tokens are correct.

    Args:
        kept: how many tokens of each block are correct and committed, 1 to `block_size`.
        commit: replaces `TargetCache.commit`, to inject a bug.

    Returns:
        logits `(len - prompt_length, vocab)` that predict the tokens after the prompt, and the restored cache.
    """
    cache = DynamicCache(config=model.config)
    length = text.shape[1]
    with TargetCache(cache, model, max_length=length, block_size=block_size) as target_cache:
        outputs = [forward(model, text[:, :prompt_length], cache)[0, -1:]]
        position = prompt_length
        while position < length - 1:
            # The block starts with the token at `position`, whose logits came from the previous round.
            block = text[:, position : min(position + block_size, length - 1)]
            count = min(next(kept), block.shape[1])
            target_cache.begin_block()
            logits = forward(model, corrupted(block, count, model.config.get_text_config().vocab_size), cache)
            (commit or TargetCache.commit)(target_cache, torch.tensor([count]), block.shape[1])
            outputs.append(logits[0, :count])
            position += count
        assert target_cache.get_seq_length() in (length - 1, None)
    return torch.cat(outputs), cache


def cycle(values: Iterable[int]) -> Iterator[int]:
    """Repeat the values forever."""
    values = list(values)
    while True:
        yield from values


def states(cache: DynamicCache) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a cache with its kind of state."""
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
    """Return the largest absolute difference between two caches by kind of state; shapes must match."""
    result: dict[str, float] = {}
    for (kind, a), (_, b) in zip(states(one), states(other), strict=True):
        assert a.shape == b.shape, f"{kind}: {tuple(a.shape)} and {tuple(b.shape)}"
        result[kind] = max(result.get(kind, 0.0), float((a.float() - b.float()).abs().max()) if a.numel() else 0.0)
    return result
