"""Attention of a verified block to a long context, without copying the context.

Owns: the one stand-in for transformers' "sdpa" attention function, active only inside `block_attention()` on the thread
that entered it.

Does not know: targets, caches, rounds.

Where several query heads share a key head, transformers' function repeats keys and values for a forward of more than
one token with a mask, once per layer and round: a copy of the whole context, times the query heads per key head. The
same attention is had by laying the query heads that share a key head side by side as further queries of that head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

#: The masks already laid out for the open block, by the mask they were made from; None outside a block.
_laid_out: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("hf_dflash_block_masks", default=None)

#: Arguments under which only transformers' own function knows what to do.
_OTHER_ATTENTION = ("position_bias", "softcap", "output_attentions")


@contextmanager
def block_attention() -> Iterator[None]:
    """Attend without copying in the forwards that this thread makes inside the `with` block."""
    token = _laid_out.set({})
    try:
        yield
    finally:
        _laid_out.reset(token)


def install() -> None:
    """Put the stand-in before transformers' "sdpa" attention function; safe twice."""
    plain_attention = AttentionInterface()["sdpa"]
    if not hasattr(plain_attention, "_hf_dflash_stand_in"):
        AttentionInterface.register("sdpa", _standing_before(plain_attention))


def _standing_before(plain_attention):
    def attention(module: nn.Module, query, key, value, attention_mask, **kwargs: Any):
        # The first question keeps graphs that a user compiles free of this function.
        if torch.compiler.is_compiling() or _laid_out.get() is None or not _shares_keys(query, key, attention_mask):
            return plain_attention(module, query, key, value, attention_mask, **kwargs)
        if any(kwargs.get(name) is not None and kwargs[name] is not False for name in _OTHER_ATTENTION):
            return plain_attention(module, query, key, value, attention_mask, **kwargs)
        return grouped_attention(query, key, value, attention_mask, kwargs.get("scaling")), None

    attention._hf_dflash_stand_in = True
    return attention


def _shares_keys(query: torch.Tensor, key: torch.Tensor, mask: Any) -> bool:
    """Whether transformers would repeat keys: several queries, several query heads per key head, one mask for all
    heads.
    """
    return (
        query.shape[2] > 1
        and query.shape[1] > key.shape[1]
        and isinstance(mask, torch.Tensor)
        and mask.dim() == 4
        and mask.shape[1] == 1
    )


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Attention in which `heads / key_heads` neighboring query heads share a key head.

    Args:
        query: `(batch, heads, n, D)`.
        key, value: `(batch, key_heads, keys, D)`, possibly views of a larger buffer.
        mask: `(batch, 1, n, keys)`, boolean (True attends) or added to the scores.
        scaling: factor of the scores; None for `D ** -0.5`.

    Returns:
        `(batch, n, heads, D)`, as transformers' attention functions return it.

    Example:
        9 heads, 3 key heads, n = 8. Heads 0, 1, 2 share key head 0; they become 24 queries of it: head 0's eight, head
        1's eight, head 2's eight. Row 10 of them is query 2 of head 1, so its mask is row 10 % 8 = 2: the mask three
        times over.
    """
    batch, heads, n, width = query.shape
    shared = heads // key.shape[1]
    masks = _laid_out.get()
    laid_out = None if masks is None else masks.get(id(mask))
    if laid_out is None:
        laid_out = mask.repeat(1, 1, shared, 1)
        if masks is not None:
            masks[id(mask)] = laid_out
    queries = query.reshape(batch, heads // shared, shared * n, width)
    attended = nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=laid_out, scale=scaling)
    return attended.reshape(batch, heads, n, -1).transpose(1, 2).contiguous()
