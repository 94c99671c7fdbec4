"""Save a finished draft in the canonical, z-lab or speculators layout.

Reading these layouts is left to `hf_dflash.draft.layouts`; the tests check the round trip.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.layouts import NETWORK_KEYS, OUTPUT_KEYS, VERSION_2_KEYS
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.files import atomic_folder
from hf_dflash.ownership import RECEIPT, foreign_files, record_made, shorten


def zlab_config(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """Build z-lab's `config.json`: a Qwen3 configuration with a `dflash_config`, as vLLM, SGLang and the `dflash`
    package read it.

    Raises:
        TrainingError: the draft mixes causal and non-causal layers in a way this layout cannot express.
    """
    nested = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
    }
    nested |= _non_default_scales(config)
    if config.dflash_version == 2:
        nested |= {"projector_type": "dflash2"} | {key: getattr(config, key) for key in VERSION_2_KEYS}
    return {
        "architectures": ["DFlash2DraftModel" if config.dflash_version == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        **_network(config),
        "rope_parameters": dict(config.rope_parameters),
        # dflash 0.1.0 reads the block size here, newer versions and other readers in dflash_config.
        "block_size": config.block_size,
        "num_target_layers": config.target_num_hidden_layers,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "dflash_config": nested,
        **({} if (causal := _shared_causality(config)) is None else {"is_causal": causal}),
    }


def speculators_config(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """Build speculators' `config.json`: nested decoder configuration, taps counted from 1.

    Raises:
        TrainingError: the draft has causal full-attention layers, which this layout cannot express.
    """
    if any(
        causal and kind == "full_attention"
        for kind, causal in zip(config.layer_types, config.layer_causal, strict=True)
    ):
        raise TrainingError("the speculators layout has no key for causal full-attention layers; use --layout zlab")
    version_2 = config.dflash_version == 2
    return {
        "architectures": ["DFlash2DraftModel" if version_2 else "DFlashDraftModel"],
        "speculators_model_type": "dflash2" if version_2 else "dflash",
        "transformer_layer_config": {
            "model_type": "qwen3",
            **_network(config),
            "rope_parameters": dict(config.rope_parameters),
        },
        "block_size": config.block_size,
        # Decoder layer 1 is hidden_states[2]: speculators counts the embedding as 0.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "sliding_window_non_causal": not any(config.layer_causal),
        "dtype": dtype,
        **_non_default_scales(config),
        **({key: getattr(config, key) for key in VERSION_2_KEYS} if version_2 else {}),
        "speculators_config": {
            "algorithm": "dflash2" if version_2 else "dflash",
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": []},
        },
    }


def _network(config: DFlashConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in (*NETWORK_KEYS, "layer_types", "sliding_window")}


def _non_default_scales(config: DFlashConfig) -> dict[str, Any]:
    """Return the scales and the soft-cap that have an effect."""
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    return {key: getattr(config, key) for key in OUTPUT_KEYS if getattr(config, key) != neutral[key]}


def _shared_causality(config: DFlashConfig) -> bool | None:
    """Return the causality of all layers, or None if the layer types already imply it."""
    if config.layer_causal == [kind == "sliding_attention" for kind in config.layer_types]:
        return None
    if len(set(config.layer_causal)) > 1:
        raise TrainingError(f"the zlab layout has one causality for all layers; this draft has {config.layer_causal}")
    return config.layer_causal[0]


def save_draft(
    draft: DFlashDraftModel, folder: str | Path, layout: str = "canonical", extra: dict[str, str] | None = None
) -> Path:
    """Write a draft folder atomically.

    A folder that holds only what `save_draft` or `export_draft` wrote is replaced; any other must be empty or missing.

    Args:
        layout: canonical, zlab or speculators.
        extra: additional text files, name to content.

    Raises:
        TrainingError: the folder holds other files, the layout cannot express the draft, or the disk is full.
    """
    folder = Path(folder)
    # Through a link, the folder that it leads to is written; the link stays.
    place = folder.resolve()
    config = layout_config(draft.config, layout, str(draft.dtype).removeprefix("torch."))
    for name in extra or {}:
        if name != Path(name).name or name in (RECEIPT, "config.json", "model.safetensors"):
            raise TrainingError(f"extra: {name!r} is not the plain name of an additional file")
    if foreign := foreign_files(place):
        raise TrainingError(
            f"{folder} holds files that hf-dflash did not verifiably write ({shorten(foreign)}), so it is not "
            "replaced. Choose a new or empty folder, or move these files"
        )
    try:
        with atomic_folder(place) as partial:
            if config is None:
                draft.save_pretrained(partial)
            else:
                (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
                tensors = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
                save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            for name, text in (extra or {}).items():
                (partial / name).write_text(text, encoding="utf-8")
            record_made(partial)
    except OSError as error:
        raise TrainingError(f"saving the draft to {folder} failed: {error}") from error
    return folder


def layout_config(config: DFlashConfig, layout: str, dtype: str) -> dict[str, Any] | None:
    """Build the `config.json` of a layout; None for the canonical one, which transformers writes.

    Raises:
        TrainingError: there is no such layout, or it cannot express the draft.
    """
    builders = {"canonical": lambda *_: None, "zlab": zlab_config, "speculators": speculators_config}
    if layout not in builders:
        raise TrainingError(f"layout must be one of {', '.join(builders)}; found {layout!r}")
    return builders[layout](config, dtype)
