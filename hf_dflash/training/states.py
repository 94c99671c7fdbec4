"""What the target knows of a text: taps and, for distillation, its last hidden state.

Owns: one forward of the target that keeps only these, and running the draft on packed blocks with them.

Does not know: data sets, losses, files (see `state_cache`).
"""

from dataclasses import dataclass
from typing import Any

import torch

from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.packing import PackedBlocks, attention_masks, flex_block_masks


@dataclass(frozen=True)
class TargetStates:
    """States of a batch of sequences.

    Attributes:
        taps: `(batch, c, taps * hidden)`, outputs of the tapped decoder layers side by side.
        final: `(batch, c, hidden)`, what the target's head reads at each position, or None. `final[:, p]` predicts
            token p + 1.
    """

    taps: torch.Tensor
    final: torch.Tensor | None = None


class StateCapture:
    """Runs the target over whole sequences and keeps taps (and the last hidden state), without its head and without a
    cache.

    Args:
        target: the target.
        layer_ids: the draft's taps.
        with_final: keep the last hidden state too.
    """

    def __init__(self, target: Target, layer_ids: list[int], with_final: bool = False):
        self._target = target
        self._layer_ids = layer_ids
        self._with_final = with_final
        self._decoder: Any = target.model.get_decoder()

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor) -> TargetStates:
        """States of `(batch, c)` sequences padded on the right.

        No mask is needed: a causal model's states at real positions do not depend on the padding behind them.
        """
        ids = input_ids.to(self._target.model.device)
        with self._target.taps(self._layer_ids) as taps, taps.recording():
            final = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            kept = taps.take(ids.device)
        return TargetStates(kept, final if self._with_final else None)


def run_blocks(
    draft: Any, config_of: DFlashDraftModel, target: Target, taps: torch.Tensor, packed: PackedBlocks
) -> torch.Tensor:
    """The draft's hidden states at every block position.

    Args:
        draft: what is called: the draft, or the draft wrapped for several devices.
        config_of: the bare draft.
        taps: `(batch, c, taps * hidden)`.

    Returns:
        `(batch, m, s, hidden)`.
    """
    with torch.no_grad():
        embedded = target.embed(packed.input_ids) if config_of.embed_tokens is None else None
    if embedded is None:
        embedded = config_of.embed_tokens(packed.input_ids)
    flex = config_of.config._attn_implementation == "flex_attention"
    masks = (flex_block_masks if flex else attention_masks)(packed, config_of.config)
    output = draft(
        noise_embeds=embedded,
        context_hidden_states=taps,
        attention_mask=masks,
        position_ids=packed.position_ids,
        use_cache=False,
        block_length=packed.block_size,
    )
    return output.last_hidden_state.unflatten(1, (-1, packed.block_size))
