"""The attention masks of the draft: full or sliding, bidirectional or causal, over context and block, with padding.

Masks come in the form that each attention implementation takes. This file is uploaded to the Hub, so it imports only
torch and its sibling `errors`.
"""

from typing import Any, Protocol

import torch

from .errors import UnsupportedOptionError


class AttentionLayer(Protocol):
    """What a mask depends on in a layer."""

    layer_type: str
    is_causal: bool
    sliding_window: int | None


class BlockMasks:
    """The attention masks of one forward, built on demand and once per kind of layer.

    Keys are counted from the end, since a sliding cache may return fewer than it has seen: of `num_keys` keys the last
    n belong to the block. For n = 3 and num_keys = 8, query 0 is key 5 and query 2 is key 7.

    Args:
        implementation: transformers' name of the attention implementation.
        block_length: n, the number of queries.
        attention_mask: None; or (batch, >= num_keys) with 0 at padding; or a ready-made mask, used as is:
            (batch or 1, 1, n, num_keys), bool (True: attend) or additive, one for all layers or a dict with one per
            layer type.
    """

    def __init__(self, implementation: str, block_length: int, attention_mask: Any) -> None:
        self.implementation = implementation
        self.block_length = block_length
        self.padding: torch.Tensor | None = None
        self.ready: Any = None
        self._built: dict[tuple, Any] = {}
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            # One device sync costs less than a mask in every layer; a compiled graph cannot sync.
            if torch.compiler.is_compiling() or not bool(attention_mask.all()):
                self.padding = attention_mask.bool()
        else:
            self.ready = attention_mask

    @property
    def is_flash(self) -> bool:
        return "flash" in self.implementation

    def visible_keys(self, attention: AttentionLayer, num_keys: int) -> int:
        """Return how many of the last keys any query can see; the rest need not be read.

        Window 4, n = 3: query 0 also sees the 3 keys before the block, so 6 keys matter however long the context is.
        If rows are padded, windows count real tokens only and reach further back.
        """
        if attention.sliding_window is None or self.padding is not None or self.ready is not None:
            return num_keys
        return min(num_keys, attention.sliding_window - 1 + self.block_length)

    def get(self, attention: AttentionLayer, query: torch.Tensor, num_keys: int) -> Any:
        """Return the mask for a layer in the form its attention implementation takes; None if every key is visible."""
        kind = (attention.layer_type, attention.is_causal, num_keys, query.device)
        if kind not in self._built:
            self._built[kind] = self._build(attention, query, num_keys)
        return self._built[kind]

    def _build(self, attention: AttentionLayer, query: torch.Tensor, num_keys: int) -> Any:
        if self.padding is not None and self.padding.shape[-1] < num_keys:
            raise UnsupportedOptionError(
                f"attention_mask covers {self.padding.shape[-1]} positions, but cached context, new context and block "
                f"add up to {num_keys}. It must cover all of them."
            )
        if self.ready is not None:
            mask = self.ready[attention.layer_type] if isinstance(self.ready, dict) else self.ready
            if mask is not None and self.is_flash:
                raise UnsupportedOptionError(
                    "Flash attention does not accept a ready-made mask: use sdpa, eager or flex_attention."
                )
            return self._adapt(mask.to(query.device), query) if isinstance(mask, torch.Tensor) else mask
        if self.is_flash:
            return None if self.padding is None else self.padding[:, -num_keys:].to(query.device)

        window, causal = attention.sliding_window, attention.is_causal and self.block_length > 1
        if self.padding is None and not causal and (window is None or num_keys <= window):
            return None
        return self._adapt(self._allowed(num_keys, window, causal, query.device), query)

    def _allowed(self, num_keys: int, window: int | None, causal: bool, device: torch.device) -> torch.Tensor:
        """Return (batch or 1, 1, n, num_keys) bool: which key each query sees.

        Positions count real tokens, so a window skips padding: mask 1 0 0 1 1 gives positions 1 1 1 2 3.
        """
        if self.padding is None:
            valid = torch.ones((1, num_keys), dtype=torch.bool, device=device)
        else:
            valid = self.padding[:, -num_keys:].to(device)
        positions = valid.long().cumsum(-1)
        ahead = positions[:, None, :] - positions[:, -self.block_length :, None]
        allowed = valid[:, None, :].expand_as(ahead)
        if causal:
            allowed = allowed & (ahead <= 0)
        if window is not None:
            # The window includes the query itself: window 4 sees 3 keys back, and 3 ahead if it is not causal.
            allowed = allowed & (ahead.abs() < window)
        return allowed[:, None]

    def _adapt(self, mask: torch.Tensor, query: torch.Tensor) -> Any:
        if mask.dtype != torch.bool:
            return mask
        if self.implementation == "eager":
            return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        if self.implementation == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            batch, _, num_queries, num_keys = mask.shape
            rows = None if batch == 1 else batch
            return create_block_mask(
                lambda b, h, q, k: mask[b if rows else 0, 0, q, k],
                rows,
                None,
                num_queries,
                num_keys,
                device=query.device,
            )
        return mask


__all__ = ["AttentionLayer", "BlockMasks"]
