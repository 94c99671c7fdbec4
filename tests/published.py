"""Writes tiny draft checkpoints in every published layout: the inverse of `hf_dflash.draft.layouts`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_drafts import tiny_draft

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.modeling_dflash import DFlashDraftModel

TARGET_DEPTH = 6
_NETWORK = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "vocab_size",
    "layer_types",
    "sliding_window",
)
_VERSION_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SLIDING = ["sliding_attention"] * 2


def _pick(config: DFlashConfig, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: getattr(config, key) for key in keys}


def z_lab(config: DFlashConfig) -> dict[str, Any]:
    """Layout A: block size and RoPE theta at top level."""
    return {
        **_pick(config, (*_NETWORK, "block_size")),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_target_layers": TARGET_DEPTH,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "dflash_config": _pick(config, ("mask_token_id", "target_layer_ids")),
    }


def z_lab_nested(config: DFlashConfig) -> dict[str, Any]:
    """Layout B: block size in `dflash_config`, `rope_parameters`."""
    raw = z_lab(config)
    raw["dflash_config"]["block_size"] = raw.pop("block_size")
    del raw["rope_theta"], raw["rope_scaling"]
    return {**raw, "rope_parameters": config.rope_parameters, "use_sliding_window": config.sliding_window is not None}


def dflash2(config: DFlashConfig) -> dict[str, Any]:
    """Layout D: like B, with DFlash 2's keys, bidirectional, no dtype, no remote code."""
    raw = z_lab_nested(config)
    del raw["auto_map"]
    raw["dflash_config"] |= _pick(config, _VERSION_2)
    return {**raw, "architectures": ["DFlash2DraftModel"], "is_causal": False, "torch_dtype": None}


def modelopt(config: DFlashConfig) -> dict[str, Any]:
    """Layout F: all layers are listed as full, and a flag makes them slide."""
    raw = z_lab(config)
    raw["dflash_config"] |= {"use_swa": True, "swa_window_size": config.sliding_window, "causal": False}
    return {**raw, "layer_types": ["full_attention"] * config.num_hidden_layers}


def muse(config: DFlashConfig) -> dict[str, Any]:
    """Layout C: everything at top level, no vocabulary."""
    raw = _pick(config, (*_NETWORK, "block_size", "mask_token_id", "target_layer_ids", "rope_parameters"))
    del raw["vocab_size"]
    return {**raw, "model_type": "muse_glimmer_assistant", "dtype": "bfloat16"}


def speculators(config: DFlashConfig) -> dict[str, Any]:
    """Layout G: the decoder nested, tap ids one higher."""
    kind = "dflash2" if config.dflash_version == 2 else "dflash"
    return {
        "speculators_model_type": kind,
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {
            **_pick(config, (*_NETWORK, "rope_parameters")),
            "model_type": "qwen3",
        },
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "sliding_window_non_causal": not any(config.layer_causal),
        "speculators_config": {"verifier": {"name_or_path": "some/target"}},
        "dtype": "bfloat16",
        **_pick(config, ("block_size", "mask_token_id", *_VERSION_2)),
    }


def canonical(config: DFlashConfig) -> dict[str, Any]:
    return {**config.to_dict(), "dtype": "bfloat16"}


def _speculators_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "d2t" not in state:
        return state
    t2d = torch.zeros(128, dtype=torch.bool)
    t2d[torch.arange(len(state["d2t"])) + state["d2t"]] = True
    return {**state, "t2d": t2d}


def _muse_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {names.get(name, name): tensor for name, tensor in state.items()}


def _embedded_codebooks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the authors' module is saved: its codebooks are embeddings."""
    return {f"{name}.weight" if name.endswith("_codebook") else name: tensor for name, tensor in state.items()}


# Layout -> (a draft that it can represent, its config.json, its tensors).
PUBLISHED: dict[str, tuple[Callable[[], DFlashDraftModel], Callable, Callable]] = {
    "z-lab": (lambda: tiny_draft(), z_lab, dict),
    "z-lab-nested": (lambda: tiny_draft(layer_types=["sliding_attention", "full_attention"]), z_lab_nested, dict),
    "dflash2": (lambda: tiny_draft(2, SLIDING, layer_causal=[False] * 2), dflash2, dict),
    "dflash2-module": (lambda: tiny_draft(2, SLIDING, layer_causal=[False] * 2), dflash2, _embedded_codebooks),
    "modelopt": (lambda: tiny_draft(1, SLIDING, layer_causal=[False] * 2, own_embeddings=True), modelopt, dict),
    "muse": (lambda: tiny_draft(1, SLIDING, layer_causal=[False] * 2), muse, _muse_tensors),
    "speculators": (lambda: tiny_draft(draft_vocab_size=32), speculators, _speculators_tensors),
    "speculators-sliding": (lambda: tiny_draft(1, SLIDING), speculators, _speculators_tensors),
    "speculators-dflash2": (lambda: tiny_draft(2, SLIDING, layer_causal=[False] * 2), speculators, dict),
    "canonical": (lambda: tiny_draft(2, SLIDING), canonical, dict),
}


def publish(
    folder: Path,
    name: str = "z-lab",
    *,
    draft: DFlashDraftModel | None = None,
    edit: Callable[[dict], Any] | None = None,
    edit_tensors: Callable[[dict], Any] | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> DFlashDraftModel:
    """Write a tiny draft to a folder in one of the `PUBLISHED` layouts and return it in its stored dtype.

    Args:
        draft: a draft to write instead of the layout's example.
        edit, edit_tensors: edit the `config.json` and the tensors by published name before they are written.
        shards: number of safetensors files; with more than one, an index is written.
    """
    example, config_of, tensors_of = PUBLISHED[name]
    draft = (draft or example()).to(dtype) if dtype != torch.float16 else draft or example()
    raw = config_of(draft.config)
    state = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in draft.state_dict().items()
    }
    tensors = tensors_of(state)
    if edit is not None:
        edit(raw)
    if edit_tensors is not None:
        edit_tensors(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return draft
    names = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    files = {tensor: names[index % shards] for index, tensor in enumerate(sorted(tensors))}
    for file in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if files[tensor] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return draft
