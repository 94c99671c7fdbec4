"""Sliding and chunked attention layers of the target's cache: the last window and the open block, in a bounded buffer.

transformers uses `DynamicSlidingWindowLayer` for both.
"""

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache.block_layer import BlockLayer, LayerPlan, same_for_all_rows
from hf_dflash.target.cache.buffer import GrowingBuffer


class SlidingAttentionLayer(BlockLayer, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer` that writes in place, returns views and can drop the last tokens it read.

    `update` returns what the original would: the last `window - 1` entries and the new ones. The buffer keeps at least
    `window - 1` entries before the last committed token, so any suffix read since can be dropped. Its capacity is twice
    that, and its entries move to the front when it is full, so the cost per token does not grow with the length.

    Args: as `FullAttentionLayer`.
    """

    def __init__(self, original: DynamicSlidingWindowLayer, plan: LayerPlan):
        DynamicSlidingWindowLayer.__init__(self, sliding_window=original.sliding_window)
        self.original = original
        # What must remain after a whole block is rolled back, plus the block.
        self._min_kept = self.sliding_window - 1 + plan.block_size
        # Twice that, so entries move to the front only once every (window - 1 + block) tokens.
        self._ceiling = min(plan.max_length + plan.block_size, 2 * self._min_kept)
        self._key_buffer = GrowingBuffer(self._ceiling)
        self._value_buffer = GrowingBuffer(self._ceiling)
        self._committed = 0
        self._before_long_read: tuple[GrowingBuffer, GrowingBuffer, int] | None = None
        if original.is_initialized and original.get_seq_length() > 0:
            DynamicSlidingWindowLayer.lazy_initialization(self, original.keys, original.values)
            kept = self._min_kept
            self._append(original.keys[..., -kept:, :], original.values[..., -kept:, :])
            self.cumulative_length = original.cumulative_length
            SlidingAttentionLayer.begin_block(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(batch, heads, n, D)` and return the last `window - 1 + n` entries, or all if there are fewer."""
        if not self.is_initialized:
            DynamicSlidingWindowLayer.lazy_initialization(self, key_states, value_states)
        new = key_states.shape[-2]
        if new > self._min_kept:
            visible = self._read_long(key_states, value_states)
        else:
            self._append(key_states, value_states)
            visible = (self._key_buffer.last(self._past + new), self._value_buffer.last(self._past + new))
        self.cumulative_length += new
        self._refresh_views()
        return visible

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens (a number <= 0), all read since the last commit."""
        dropped = abs(tokens_to_remove)
        if not dropped or not self.is_initialized:
            return
        remaining = self.cumulative_length - dropped
        if len(self._key_buffer) - dropped < min(self._past, remaining):
            raise UnsupportedOptionError(
                f"{dropped} tokens cannot be dropped from an attention layer with a window of {self.sliding_window}: "
                f"the tokens before them are no longer stored. At most {len(self._key_buffer) - self._past} can be."
            )
        self._key_buffer.drop_last(dropped)
        self._value_buffer.drop_last(dropped)
        self.cumulative_length = remaining
        self._refresh_views()

    def begin_block(self) -> None:
        self._committed = self.cumulative_length
        self._before_long_read = None

    def commit(self, kept: list[int], verified: int) -> None:
        # Counted from the start of the block, so that an interrupted commit can be repeated.
        surplus = self.cumulative_length - self._committed - same_for_all_rows(kept)
        SlidingAttentionLayer.crop(self, -max(surplus, 0))
        SlidingAttentionLayer.begin_block(self)

    def roll_back(self) -> None:
        if self._before_long_read is not None:
            self._key_buffer, self._value_buffer, self.cumulative_length = self._before_long_read
        if self._committed:
            SlidingAttentionLayer.crop(self, self._committed - self.cumulative_length)
            self._refresh_views()
        else:
            # Like a new layer, which holds no tensors.
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
        """Earlier tokens that a query attends to; the window includes the query itself."""
        return self.sliding_window - 1

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        keep = self._past + self.cumulative_length - self._committed
        self._key_buffer.append(key_states, keep)
        self._value_buffer.append(value_states, keep)

    def _read_long(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read more than the buffer is sized for (a prompt): the model sees all of it, the buffer keeps the end."""
        if len(self._key_buffer):
            keys = torch.cat([self._key_buffer.last(self._past), keys], dim=-2)
            values = torch.cat([self._value_buffer.last(self._past), values], dim=-2)
        if self._before_long_read is None:
            self._before_long_read = (self._key_buffer, self._value_buffer, self.cumulative_length)
        self._key_buffer, self._value_buffer = GrowingBuffer(self._ceiling), GrowingBuffer(self._ceiling)
        self._key_buffer.append(keys[..., -self._min_kept :, :])
        self._value_buffer.append(values[..., -self._min_kept :, :])
        return keys, values

    def _refresh_views(self) -> None:
        self.keys = self._key_buffer.last(self._past)
        self.values = self._value_buffer.last(self._past)
