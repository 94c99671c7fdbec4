"""Sliding and chunked attention layers of the target's cache: the last window and the open block, in a bounded buffer.

Owns: the stand-in for transformers' `DynamicSlidingWindowLayer`, which serves chunked attention as well.

Does not know: masks, positions, other layer kinds.
"""

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache.block_layer import BlockLayer, LayerPlan, same_for_all_rows
from hf_dflash.target.cache.buffer import GrowingBuffer


class SlidingAttentionLayer(BlockLayer, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer` that writes in place, returns views and can forget the end of what it read.

    `update` returns what the original would: the last `window - 1` entries and the new ones. The buffer keeps at least
    `window - 1` entries before the last committed token, so any suffix read since can be dropped. It holds twice that
    and moves its entries to the front when it is full, so a token costs the same at any length.

    Args: as `FullAttentionLayer`.
    """

    def __init__(self, original: DynamicSlidingWindowLayer, plan: LayerPlan):
        DynamicSlidingWindowLayer.__init__(self, sliding_window=original.sliding_window)
        self.original = original
        # What a block that is rolled back whole leaves behind, and the block.
        self._kept_at_least = self.sliding_window - 1 + plan.block_size
        # Twice that, so entries move to the front only once in (window - 1 + block) tokens.
        self._ceiling = min(plan.max_length + plan.block_size, 2 * self._kept_at_least)
        self._key_buffer = GrowingBuffer(self._ceiling)
        self._value_buffer = GrowingBuffer(self._ceiling)
        self._committed = 0
        self._before_long_read: tuple[GrowingBuffer, GrowingBuffer, int] | None = None
        if original.is_initialized and original.get_seq_length() > 0:
            DynamicSlidingWindowLayer.lazy_initialization(self, original.keys, original.values)
            kept = self._kept_at_least
            self._append(original.keys[..., -kept:, :], original.values[..., -kept:, :])
            self.cumulative_length = original.cumulative_length
            SlidingAttentionLayer.begin_block(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(batch, heads, n, D)`; return the last `window - 1 + n` (or all there are)."""
        if not self.is_initialized:
            DynamicSlidingWindowLayer.lazy_initialization(self, key_states, value_states)
        new = key_states.shape[-2]
        if new > self._kept_at_least:
            seen = self._read_long(key_states, value_states)
        else:
            self._append(key_states, value_states)
            seen = (self._key_buffer.last(self._past + new), self._value_buffer.last(self._past + new))
        self.cumulative_length += new
        self._show()
        return seen

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens (a number <= 0), none of them older than the last commit."""
        dropped = abs(tokens_to_remove)
        if not dropped or not self.is_initialized:
            return
        remaining = self.cumulative_length - dropped
        if len(self._key_buffer) - dropped < min(self._past, remaining):
            raise UnsupportedOptionError(
                f"{dropped} tokens cannot be dropped from an attention layer with a window of {self.sliding_window}: "
                f"the tokens before them are gone. At most {len(self._key_buffer) - self._past} can."
            )
        self._key_buffer.drop_last(dropped)
        self._value_buffer.drop_last(dropped)
        self.cumulative_length = remaining
        self._show()

    def begin_block(self) -> None:
        self._committed = self.cumulative_length
        self._before_long_read = None

    def commit(self, kept: list[int], verified: int) -> None:
        # Counted from the start of the block, so that a commit that was interrupted can be repeated.
        surplus = self.cumulative_length - self._committed - same_for_all_rows(kept)
        SlidingAttentionLayer.crop(self, -max(surplus, 0))
        SlidingAttentionLayer.begin_block(self)

    def roll_back(self) -> None:
        if self._before_long_read is not None:
            self._key_buffer, self._value_buffer, self.cumulative_length = self._before_long_read
        if self._committed:
            SlidingAttentionLayer.crop(self, self._committed - self.cumulative_length)
            self._show()
        else:
            # As a fresh layer, which holds no tensors at all.
            self._key_buffer, self._value_buffer = GrowingBuffer(self._ceiling), GrowingBuffer(self._ceiling)
            self.keys, self.values, self.is_initialized, self.cumulative_length = None, None, False, 0
        SlidingAttentionLayer.begin_block(self)

    def release(self) -> DynamicSlidingWindowLayer:
        if self.is_initialized:
            if not self.original.is_initialized:
                self.original.lazy_initialization(self.keys, self.values)
            self.original.keys, self.original.values = self.keys, self.values
            self.original.cumulative_length = self.cumulative_length
        return self.original

    @property
    def _past(self) -> int:
        """Earlier tokens that a query attends to: the window counts the query itself."""
        return self.sliding_window - 1

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        keep = self._past + self.cumulative_length - self._committed
        self._key_buffer.append(key_states, keep)
        self._value_buffer.append(value_states, keep)

    def _read_long(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read more than the buffer is meant to hold (a prompt): the model sees all of it, the buffer keeps its end."""
        if len(self._key_buffer):
            keys = torch.cat([self._key_buffer.last(self._past), keys], dim=-2)
            values = torch.cat([self._value_buffer.last(self._past), values], dim=-2)
        if self._before_long_read is None:
            self._before_long_read = (self._key_buffer, self._value_buffer, self.cumulative_length)
        self._key_buffer, self._value_buffer = GrowingBuffer(self._ceiling), GrowingBuffer(self._ceiling)
        self._key_buffer.append(keys[..., -self._kept_at_least :, :])
        self._value_buffer.append(values[..., -self._kept_at_least :, :])
        return keys, values

    def _show(self) -> None:
        self.keys = self._key_buffer.last(self._past)
        self.values = self._value_buffer.last(self._past)
