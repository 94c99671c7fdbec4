"""Full attention layers of the target's cache (transformers' `DynamicLayer`): keys and values in a growing buffer, so
that rolling back only changes a length.
"""

import torch
from transformers.cache_utils import DynamicLayer

from hf_dflash.target.cache.block_layer import BlockLayer, LayerPlan, same_for_all_rows
from hf_dflash.target.cache.buffer import GrowingBuffer


class FullAttentionLayer(BlockLayer, DynamicLayer):
    """A `DynamicLayer` that writes in place and returns views.

    Args:
        original: the caller's layer. Its entries, if any, are copied; its tensors are never written.
        plan: the maximum sizes of the call.
    """

    def __init__(self, original: DynamicLayer, plan: LayerPlan):
        DynamicLayer.__init__(self)
        self.original = original
        self._key_buffer = GrowingBuffer(plan.max_length + plan.block_size)
        self._value_buffer = GrowingBuffer(plan.max_length + plan.block_size)
        self._committed = 0
        if original.is_initialized and original.get_seq_length() > 0:
            FullAttentionLayer.update(self, original.keys, original.values)
            FullAttentionLayer.begin_block(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(batch, heads, n, D)` keys and values and return views of all of them."""
        if not self.is_initialized:
            DynamicLayer.lazy_initialization(self, key_states, value_states)
        self._key_buffer.append(key_states)
        self._value_buffer.append(value_states)
        self._refresh_views()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return len(self._key_buffer)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens (transformers' convention: a number <= 0)."""
        if tokens_to_remove and self.is_initialized:
            self._key_buffer.drop_last(abs(tokens_to_remove))
            self._value_buffer.drop_last(abs(tokens_to_remove))
            self._refresh_views()

    def begin_block(self) -> None:
        self._committed = self.get_seq_length()

    def commit(self, kept: list[int], verified: int) -> None:
        # Counted from the start of the block, so that an interrupted commit can be repeated.
        surplus = self.get_seq_length() - self._committed - same_for_all_rows(kept)
        FullAttentionLayer.crop(self, -max(surplus, 0))
        FullAttentionLayer.begin_block(self)

    def roll_back(self) -> None:
        FullAttentionLayer.crop(self, self._committed - self.get_seq_length())
        if not self._committed:
            # Like a new layer, which holds no tensors.
            self.keys, self.values, self.is_initialized = None, None, False

    def release(self) -> DynamicLayer:
        if self.is_initialized:
            if not self.original.is_initialized:
                self.original.lazy_initialization(self.keys, self.values)
            self.original.keys, self.original.values = self.keys, self.values
        return self.original

    def _refresh_views(self) -> None:
        self.keys = self._key_buffer.last(len(self._key_buffer))
        self.values = self._value_buffer.last(len(self._value_buffer))
