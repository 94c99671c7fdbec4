"""Attention from a verified block: to a long context without copying it, and to an image as from a single token.

A wrapper around transformers' "sdpa" attention function, active only inside `block_attention()` on the thread that
entered it.

With grouped-query attention, transformers' function repeats keys and values in a masked forward of more than one token,
once per layer and round: a copy of the whole context, times the query heads per key head. Treating the query heads that
share a key head as additional queries of that head gives the same result without the copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

#: The masks already expanded for the current block, by id of the original mask; None outside a block.
_block_masks: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("hf_dflash_block_masks", default=None)

#: Arguments that only transformers' own function handles.
_OTHER_ATTENTION = ("position_bias", "softcap", "output_attentions")


@contextmanager
def block_attention() -> Iterator[None]:
    """Treat the forwards that this thread runs inside the `with` block as forwards over a block."""
    token = _block_masks.set({})
    try:
        yield
    finally:
        _block_masks.reset(token)


def install() -> None:
    """Wrap transformers' "sdpa" attention function. Calling this twice is safe."""
    plain_attention = AttentionInterface()["sdpa"]
    if not hasattr(plain_attention, "_hf_dflash_wrapper"):
        AttentionInterface.register("sdpa", _wrap(plain_attention))


def _wrap(plain_attention):
    def attention(module: nn.Module, query, key, value, attention_mask, **kwargs: Any):
        # The first check keeps this function out of graphs that the user compiles.
        if torch.compiler.is_compiling() or _block_masks.get() is None:
            return plain_attention(module, query, key, value, attention_mask, **kwargs)
        if attention_mask is None and query.shape[2] > 1:
            # A block comes after at least one token, so attention to the text has a mask. Without one it is attention
            # to an image. A single token sees all of it, but transformers' function is causal for several.
            kwargs["is_causal"] = False
        if not _shares_keys(query, key, attention_mask):
            return plain_attention(module, query, key, value, attention_mask, **kwargs)
        if any(kwargs.get(name) is not None and kwargs[name] is not False for name in _OTHER_ATTENTION):
            return plain_attention(module, query, key, value, attention_mask, **kwargs)
        return grouped_attention(query, key, value, attention_mask, kwargs.get("scaling")), None

    attention._hf_dflash_wrapper = True
    return attention


def _shares_keys(query: torch.Tensor, key: torch.Tensor, mask: Any) -> bool:
    """Whether transformers would repeat keys: several queries, grouped-query attention, one mask for all heads."""
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
    """Compute attention in which `heads / key_heads` adjacent query heads share a key head.

    Args:
        query: `(batch, heads, n, D)`.
        key, value: `(batch, key_heads, keys, D)`, possibly views of a larger buffer.
        mask: `(batch, 1, n, keys)`, boolean (True attends) or added to the scores.
        scaling: factor on the scores; None for `D ** -0.5`.

    Returns:
        `(batch, n, heads, D)`, as transformers' attention functions return it.

    Example:
        9 heads, 3 key heads, n = 8. Heads 0, 1, 2 share key head 0 and become 24 queries of it: eight of head 0, eight
        of head 1, eight of head 2. Row 10 of them is query 2 of head 1, so its mask is row 10 % 8 = 2: the mask is
        repeated three times.
    """
    batch, heads, n, width = query.shape
    shared = heads // key.shape[1]
    masks = _block_masks.get()
    expanded = None if masks is None else masks.get(id(mask))
    if expanded is None:
        expanded = mask.repeat(1, 1, shared, 1)
        if masks is not None:
            masks[id(mask)] = expanded
    queries = query.reshape(batch, heads // shared, shared * n, width)
    attended = nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=expanded, scale=scaling)
    return attended.reshape(batch, heads, n, -1).transpose(1, 2).contiguous()
