"""Layers that hold both keys and values and a recurrent state (Falcon-H1, Zamba2)."""

from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hf_dflash.target.cache.attention import FullAttentionLayer
from hf_dflash.target.cache.block_layer import LayerPlan
from hf_dflash.target.cache.recurrent import RecurrentLayer
from hf_dflash.target.cache.sliding import SlidingAttentionLayer


class HybridLayer(RecurrentLayer, FullAttentionLayer):
    """Full attention plus a recurrent state."""

    attention_half: type = FullAttentionLayer

    def __init__(
        self,
        original: LinearAttentionAndFullAttentionLayer | LinearAttentionAndSlidingWindowAttentionLayer,
        plan: LayerPlan,
    ):
        self.attention_half.__init__(self, original, plan)
        RecurrentLayer.__init__(self, original, plan)

    def begin_block(self) -> None:
        self.attention_half.begin_block(self)
        RecurrentLayer.begin_block(self)

    def commit(self, kept: list[int], verified: int) -> None:
        self.attention_half.commit(self, kept, verified)
        RecurrentLayer.commit(self, kept, verified)

    def roll_back(self) -> None:
        self.attention_half.roll_back(self)
        RecurrentLayer.roll_back(self)

    def crop(self, tokens_to_remove: int) -> None:
        self.attention_half.crop(self, tokens_to_remove)

    def release(self):
        self.attention_half.release(self)
        return RecurrentLayer.release(self)


class HybridSlidingLayer(HybridLayer, SlidingAttentionLayer):
    """Sliding attention plus a recurrent state."""

    attention_half = SlidingAttentionLayer
