"""Pack many blocks of a sequence into one forward of the draft.

Samples anchors and lays out the blocks after a shared context, with their positions, labels and attention masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import TrainingError

IGNORED = -100
"""Label of a position without loss (the anchor, positions after the end of the text, filler blocks)."""


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks of a batch of sequences, side by side after each sequence's context.

    With `c` context positions (the padded sequence length), `m` blocks per row and block size `s`:

    Attributes:
        input_ids: `(batch, m * s)`, each block `[anchor, mask, mask, ...]`.
        labels: `(batch, m, s)` the token *at* each block position, `IGNORED` for positions without loss.
        anchors: `(batch, m)` position of each block's anchor in its sequence; -1 for a filler block.
        position_ids: `(batch, c + m * s)` positions of context and blocks, as the draft's forward expects them.
        context_length: `c`.
        block_size: `s`.

    Example:
        sequence [a b c d e f] with a prompt of 2, block size 3 and anchors 2 and 4: blocks [c M M] at positions 2, 3,
        4 with labels [-, d, e], which attends to the context a b, and [e M M] at 4, 5, 6 with labels [-, f, -], which
        attends to a b c d.
    """

    input_ids: torch.LongTensor
    labels: torch.LongTensor
    anchors: torch.LongTensor
    position_ids: torch.LongTensor
    context_length: int
    block_size: int


def choose_anchors(prompt_length: int, length: int, count: int, generator: torch.Generator) -> torch.LongTensor:
    """Sample up to `count` distinct positions at which a block can start, ascending.

    An anchor is a response token that has a successor: decoding starts with the first response token as anchor, and a
    block at the last token has no labels. Prompt 3, length 7: anchors are among 3, 4, 5.
    """
    eligible = max(0, length - 1 - prompt_length)
    chosen = torch.randperm(eligible, generator=generator)[:count] + prompt_length
    return chosen.sort().values


def pack_blocks(
    input_ids: torch.LongTensor,
    lengths: Sequence[int],
    anchors: Sequence[torch.LongTensor],
    block_size: int,
    mask_token_id: int,
) -> PackedBlocks:
    """Lay out one block per anchor.

    Args:
        input_ids: `(batch, c)` sequences (prompt and response), padded on the right.
        lengths: length of each sequence without padding.
        anchors: positions of each row's anchors; rows may have different numbers of them.

    Raises:
        TrainingError: no row has an anchor.
    """
    batch, context_length = input_ids.shape
    num_blocks = max(len(row) for row in anchors)
    if num_blocks == 0:
        raise TrainingError(
            "no sequence in this batch has two consecutive response tokens, so there is nothing to train on"
        )
    device = input_ids.device
    starts = torch.full((batch, num_blocks), -1)
    for row, chosen in enumerate(anchors):
        starts[row, : len(chosen)] = chosen
    starts = starts.to(device)
    positions = starts.clamp(min=0)[..., None] + torch.arange(block_size, device=device)  # (batch, m, s)
    real = (starts >= 0)[..., None] & (positions < torch.as_tensor(lengths, device=device)[:, None, None])
    tokens = input_ids.gather(1, positions.clamp(max=context_length - 1).flatten(1)).view_as(positions)
    labels = tokens.masked_fill(~real, IGNORED)
    labels[..., 0] = IGNORED
    blocks = torch.full_like(tokens, mask_token_id)
    blocks[..., 0] = tokens[..., 0]
    context_positions = torch.arange(context_length, device=device).expand(batch, -1)
    return PackedBlocks(
        input_ids=blocks.flatten(1),
        labels=labels,
        anchors=starts,
        position_ids=torch.cat([context_positions, positions.flatten(1)], dim=1),
        context_length=context_length,
        block_size=block_size,
    )


def attention_masks(packed: PackedBlocks, config: DFlashConfig) -> dict[str, torch.Tensor]:
    """Build the attention mask of the blocks for each layer type of the draft.

    A query of block `b` attends to the context strictly before its anchor and to its own block (in a causal layer, only
    up to itself). A sliding layer keeps only keys less than `sliding_window` away.

    Returns:
        layer type to `(batch, 1, m * s, c + m * s)` bool, True to attend.

    Raises:
        TrainingError: some layers of one type are causal and others are not.
    """
    c, s = packed.context_length, packed.block_size
    queries = packed.position_ids[:, c:]
    distance = packed.position_ids[:, None, :] - queries[:, :, None]  # key minus query: negative is in the past
    anchors = packed.anchors.repeat_interleave(s, dim=1)
    context = torch.arange(c, device=anchors.device)[None, None] < anchors[..., None]
    block_of = torch.arange(anchors.shape[1], device=anchors.device) // s
    own = (block_of[:, None] == block_of[None]).expand(len(anchors), -1, -1)
    allowed = torch.cat([context, own], dim=-1)
    masks = {}
    for kind, causal in causality(config).items():
        mask = allowed & (distance <= 0) if causal else allowed
        if kind == "sliding_attention":
            mask = mask & (distance.abs() < config.sliding_window)
        masks[kind] = mask[:, None]
    return masks


def causality(config: DFlashConfig) -> dict[str, bool]:
    """Return for each layer type whether its layers are causal within the block."""
    result: dict[str, bool] = {}
    for kind, causal in zip(config.layer_types, config.layer_causal, strict=True):
        if result.setdefault(kind, causal) != causal:
            raise TrainingError(
                f"layer_causal differs among the {kind} layers ({config.layer_causal}); training needs one value per "
                "layer type"
            )
    return result


def flex_block_masks(packed: PackedBlocks, config: DFlashConfig) -> dict[str, Any]:
    """Like `attention_masks` for `attn_implementation="flex_attention"`, without materializing the dense mask.

    Flex attention skips the many tiles between different blocks.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    c, s = packed.context_length, packed.block_size
    positions, anchors = packed.position_ids, packed.anchors

    def mask_mod(causal: bool, window: int | None):
        def visible(b, h, q, k):
            block = q // s
            inside = (k >= c) & ((k - c) // s == block)
            seen = ((k < c) & (k < anchors[b, block])) | inside
            distance = positions[b, k] - positions[b, c + q]
            if causal:
                seen = seen & (distance <= 0)
            return seen if window is None else seen & (distance.abs() < window)

        return visible

    batch, total = positions.shape
    return {
        kind: create_block_mask(
            mask_mod(causal, config.sliding_window if kind == "sliding_attention" else None),
            batch,
            None,
            total - c,
            total,
            device=positions.device,
        )
        for kind, causal in causality(config).items()
    }
