"""Tiny random drafts of any shape, with weights large enough that every part of the network affects the output."""

import torch

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.modeling_dflash import DFlashDraftModel, GroupedDynamicCausalConv

# Kind of draft -> (layer types, whether each layer is causal in the block, None for the default).
LAYER_KINDS = {
    "full": (["full_attention"] * 2, None),
    "sliding_causal": (["sliding_attention"] * 2, None),
    "mixed": (["sliding_attention"] * 4 + ["full_attention"], None),
    "sliding_bidirectional": (["sliding_attention"] * 2, [False] * 2),
}


def tiny_config(
    version: int = 1,
    layer_types: list[str] | None = None,
    layer_causal: list[bool] | None = None,
    hidden_size: int = 64,
    taps: tuple[int, ...] = (0, 2),
    block_size: int = 8,
    vocab_size: int = 128,
    sliding_window: int = 6,
    **overrides,
) -> DFlashConfig:
    """Build a small canonical configuration; `overrides` are further keys of `DFlashConfig`."""
    layer_types = layer_types or ["full_attention"] * 2
    values = {
        "dflash_version": version,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": vocab_size,
        "block_size": block_size,
        "mask_token_id": vocab_size - 1,
        "target_layer_ids": list(taps),
        "layer_types": layer_types,
        "layer_causal": layer_causal,
        "sliding_window": sliding_window if "sliding_attention" in layer_types else None,
    }
    if version == 2:
        values |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    return DFlashConfig(**{**values, **overrides})


def tiny_draft(
    version: int = 1,
    layer_types: list[str] | None = None,
    hidden_size: int = 64,
    taps: tuple[int, ...] = (0, 2),
    block_size: int = 8,
    vocab_size: int = 128,
    seed: int = 0,
    initializer_range: float | None = None,
    **overrides,
) -> DFlashDraftModel:
    """Build a random draft in float32, eval mode. Equal arguments give equal weights; the global RNG is untouched.

    At the usual `initializer_range` of 0.02 attention is nearly uniform and hides wrong masks and positions, so the
    default is ten times that. In version 2, whose kernels depend on the input, it is 0.07: there the last bit of an
    input moves the output by 4e-6 (at 0.2 by 7e-5), and shifting the context by one moves it by 0.26 on average.
    """
    config = tiny_config(
        version,
        layer_types,
        hidden_size=hidden_size,
        taps=taps,
        block_size=block_size,
        vocab_size=vocab_size,
        initializer_range=initializer_range or (0.07 if version == 2 else 0.2),
        **overrides,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = DFlashDraftModel(config).float().eval()
        with torch.no_grad():
            for name, weight in draft.named_parameters():
                if name.endswith("norm.weight"):
                    weight.uniform_(0.5, 1.5)
            for module in draft.modules():
                if isinstance(module, GroupedDynamicCausalConv):
                    module.base_kernel.add_(torch.randn_like(module.base_kernel), alpha=0.3)
            if draft.d2t is not None:
                # Every draft id gets a distinct target id, in ascending order.
                chosen = torch.randperm(vocab_size)[: draft.d2t.numel()].sort().values
                draft.d2t.copy_(chosen - torch.arange(draft.d2t.numel()))
    return draft


def tiny_draft_of_kind(kind: str, version: int = 1, **overrides) -> DFlashDraftModel:
    """Build a tiny draft with one of the `LAYER_KINDS`."""
    layer_types, layer_causal = LAYER_KINDS[kind]
    return tiny_draft(version, layer_types, layer_causal=layer_causal, **overrides)
