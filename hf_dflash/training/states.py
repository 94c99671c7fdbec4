"""Capture the target states of a text (taps and, for distillation, the last hidden state), and run the draft with them.

Storing states on disk is left to `state_cache`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.packing import PackedBlocks, attention_masks, flex_block_masks


@dataclass(frozen=True)
class TargetStates:
    """Target states of a batch of sequences.

    Attributes:
        taps: `(batch, c, taps * hidden)`, concatenated outputs of the tapped decoder layers.
        final: `(batch, c, hidden)`, the input of the target's head at each position, or None. `final[:, p]` predicts
            token p + 1.
    """

    taps: torch.Tensor
    final: torch.Tensor | None = None


class StateCapture:
    """Runs the target over whole sequences, without head and cache, and keeps the taps (and the last hidden state).

    Args:
        target: the target.
        layer_ids: target layers that the draft taps.
        with_final: whether to keep the last hidden state too.
    """

    def __init__(self, target: Target, layer_ids: list[int], with_final: bool = False):
        self._target = target
        self._layer_ids = layer_ids
        self._with_final = with_final
        self._decoder: Any = target.model.get_decoder()

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor) -> TargetStates:
        """Capture the states of `(batch, c)` sequences padded on the right.

        No mask is needed: in a causal model, states at real positions do not depend on the padding after them.
        """
        ids = input_ids.to(self._target.model.device)
        with self._target.taps(self._layer_ids) as taps, taps.recording():
            final = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            kept = taps.take(ids.device)
        return TargetStates(kept, final if self._with_final else None)


def run_blocks(
    draft: Any, unwrapped: DFlashDraftModel, target: Target, taps: torch.Tensor, packed: PackedBlocks
) -> torch.Tensor:
    """Compute the draft's hidden states at every block position.

    Args:
        draft: the draft to call, possibly wrapped for several devices.
        unwrapped: the same draft without the wrapper.
        taps: `(batch, c, taps * hidden)`.

    Returns:
        `(batch, m, s, hidden)`.
    """
    with torch.no_grad():
        embedded = target.embed(packed.input_ids) if unwrapped.embed_tokens is None else None
    if embedded is None:
        embedded = unwrapped.embed_tokens(packed.input_ids)
    flex = unwrapped.config._attn_implementation == "flex_attention"
    masks = (flex_block_masks if flex else attention_masks)(packed, unwrapped.config)
    output = draft(
        noise_embeds=embedded,
        context_hidden_states=taps,
        attention_mask=masks,
        position_ids=packed.position_ids,
        use_cache=False,
        block_length=packed.block_size,
    )
    return output.last_hidden_state.unflatten(1, (-1, packed.block_size))
