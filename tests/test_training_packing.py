"""Anchors, packed blocks and their masks, against element-wise references."""

import pytest
import torch

from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.training.packing import (
    IGNORED,
    attention_masks,
    choose_anchors,
    flex_block_masks,
    pack_blocks,
)
from tests.tiny_drafts import tiny_config

KINDS = {
    "full": {"layer_types": ["full_attention"]},
    "sliding causal": {"layer_types": ["sliding_attention"]},
    "sliding bidirectional": {"layer_types": ["sliding_attention"], "layer_causal": [False]},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"]},
}
LENGTHS, ANCHORS = [12, 9], [[3, 5, 10], [4, 7]]


def packed(block_size=4):
    ids = torch.arange(1, 25).view(2, 12)
    return ids, pack_blocks(ids, LENGTHS, [torch.tensor(row) for row in ANCHORS], block_size, mask_token_id=99)


def test_the_docstring_example():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    blocks = pack_blocks(ids, [6], [torch.tensor([2, 4])], block_size=3, mask_token_id=99)
    assert blocks.input_ids.tolist() == [[12, 99, 99, 14, 99, 99]]
    assert blocks.labels.tolist() == [[[IGNORED, 13, 14], [IGNORED, 15, IGNORED]]]
    assert blocks.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4, 4, 5, 6]]


def test_anchors_are_response_tokens_with_a_successor():
    seen = set()
    for seed in range(50):
        anchors = choose_anchors(3, 7, 2, torch.Generator().manual_seed(seed))
        assert len(anchors) == 2 and anchors[0] < anchors[1]
        seen |= set(anchors.tolist())
    assert seen == {3, 4, 5}
    assert choose_anchors(3, 7, 512, torch.Generator()).tolist() == [3, 4, 5]
    assert choose_anchors(6, 7, 512, torch.Generator()).tolist() == []


def test_labels_are_the_tokens_at_their_positions_up_to_the_end_of_the_text():
    ids, blocks = packed()
    for row, anchors in enumerate(ANCHORS):
        for block in range(3):
            for k in range(4):
                at = anchors[block] + k if block < len(anchors) else None
                has_loss = at is not None and k > 0 and at < LENGTHS[row]
                assert blocks.labels[row, block, k] == (ids[row, at] if has_loss else IGNORED)


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(TrainingError, match="nothing to train on"):
        pack_blocks(torch.zeros(1, 4, dtype=torch.long), [4], [torch.tensor([], dtype=torch.long)], 4, 99)


def reference_mask(kind: str, config, blocks) -> torch.Tensor:
    """The mask of each query, one query-key pair at a time."""
    causal = dict(zip(config.layer_types, config.layer_causal, strict=True))[kind]
    c, s = blocks.context_length, blocks.block_size
    rows, total = blocks.position_ids.shape
    mask = torch.zeros(rows, 1, total - c, total, dtype=torch.bool)
    for row in range(rows):
        for query in range(total - c):
            anchor = int(blocks.anchors[row, query // s])
            position = max(anchor, 0) + query % s
            for key in range(total):
                in_context = key < c
                if in_context:
                    seen, where = key < anchor, key
                else:
                    seen, where = (key - c) // s == query // s, max(anchor, 0) + (key - c) % s
                if kind == "sliding_attention":
                    seen = seen and abs(where - position) < config.sliding_window
                if causal:
                    seen = seen and where <= position
                mask[row, 0, query, key] = seen
    return mask


@pytest.mark.parametrize("name", KINDS)
def test_masks_match_the_reference(name):
    config = tiny_config(sliding_window=5, **KINDS[name])
    _, blocks = packed()
    masks = attention_masks(blocks, config)
    assert set(masks) == set(config.layer_types)
    for kind, mask in masks.items():
        assert torch.equal(mask, reference_mask(kind, config, blocks))


@pytest.mark.parametrize("name", KINDS)
def test_flex_masks_match_the_reference(name):
    from torch.nn.attention.flex_attention import create_mask

    config = tiny_config(sliding_window=5, **KINDS[name])
    _, blocks = packed()
    for kind, mask in flex_block_masks(blocks, config).items():
        rows, total = blocks.position_ids.shape
        dense = create_mask(mask.mask_mod, rows, 1, total - blocks.context_length, total, device="cpu")
        assert torch.equal(dense, reference_mask(kind, config, blocks))


def test_layers_of_one_type_must_agree_on_causality():
    config = tiny_config(layer_types=["sliding_attention"] * 2, layer_causal=[True, False])
    with pytest.raises(TrainingError, match="one value per layer type"):
        attention_masks(packed()[1], config)


# transformers compiles flex attention, which takes half a minute on a CPU, so only one case runs it.
@pytest.mark.parametrize(
    ("version", "name", "attention"),
    [(version, name, "sdpa") for version in (1, 2) for name in KINDS] + [(1, "sliding causal", "flex_attention")],
)
def test_packed_blocks_equal_single_blocks(version, name, attention):
    """Every block of a packed forward equals a forward of that block alone after its own context."""
    torch.manual_seed(0)
    config = tiny_config(version=version, sliding_window=5, initializer_range=0.2, **KINDS[name])
    draft = DFlashDraftModel(config).eval()
    taps = torch.randn(2, 12, config.context_size)
    _, blocks = packed()
    embedded = torch.randn(2, blocks.input_ids.shape[1], config.hidden_size)
    flex = attention == "flex_attention"
    draft.set_attn_implementation(attention)
    with torch.no_grad():
        together = draft(
            noise_embeds=embedded,
            context_hidden_states=taps,
            attention_mask=(flex_block_masks if flex else attention_masks)(blocks, config),
            position_ids=blocks.position_ids,
            block_length=4,
        ).last_hidden_state.unflatten(1, (-1, 4))
        draft.set_attn_implementation("sdpa")
        for row, anchors in enumerate(ANCHORS):
            for block, anchor in enumerate(anchors):
                alone = draft(
                    noise_embeds=embedded[row : row + 1].unflatten(1, (-1, 4))[:, block],
                    context_hidden_states=taps[row : row + 1, :anchor],
                ).last_hidden_state
                torch.testing.assert_close(together[row, block], alone[0], rtol=1e-5, atol=1e-5)
