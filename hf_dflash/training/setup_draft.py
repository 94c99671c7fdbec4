"""Set up the draft before training: configuration, taps, mask token, initial weights, warm starts.

Defaults that follow from the target are all written explicitly into the configuration.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import CheckpointError, TrainingError
from hf_dflash.draft.layouts import VERSION_2_KEYS
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.settings import TrainingSettings


def default_taps(num_target_layers: int, count: int) -> list[int]:
    """Return `count` evenly spaced target layers from layer 1 to the third last, as in the published drafts.

    Example:
        5 of 36 layers: 1, 9, 17, 25, 33. Targets with fewer than 6 layers are tapped from the first to the last layer.
    """
    first, last = (1, num_target_layers - 3) if num_target_layers >= 6 else (0, num_target_layers - 1)
    if count > last - first + 1:
        raise TrainingError(
            f"{count} taps do not fit between layers {first} and {last} of a target with {num_target_layers} layers; "
            "use fewer, or set `taps`"
        )
    if count == 1:
        return [(first + last) // 2]
    return [round(first + at * (last - first) / (count - 1)) for at in range(count)]


def choose_mask_token(target: Target, tokenizer: Any, counts: torch.LongTensor, requested: int | None) -> int:
    """Choose the mask token: an id that the target can embed and that no training text contains.

    Unused ids are tried in this order: the tokenizer's special tokens, ids outside the tokenizer's vocabulary, any
    other.

    Args:
        counts: `(vocabulary,)` how often each id occurs in the training texts.
        requested: the user's choice; only checked.

    Raises:
        TrainingError: the requested id is outside the vocabulary, has a meaning (such as EOS or padding) or occurs in
            the texts; or no id is free.
    """
    reserved = _reserved_token_ids(target, tokenizer)
    if requested is not None:
        if not 0 <= requested < target.num_embeddings:
            raise TrainingError(
                f"mask_token_id {requested} is outside the target's {target.num_embeddings} embedding rows"
            )
        if requested in reserved:
            raise TrainingError(
                f"mask_token_id {requested} is already in use ({reserved[requested]}); choose an unused id"
            )
        if requested < len(counts) and counts[requested]:
            raise TrainingError(
                f"mask_token_id {requested} occurs {int(counts[requested])} times in the training texts; choose an "
                "unused id"
            )
        return requested
    special = set(getattr(tokenizer, "all_special_ids", ()) or ()) | set(
        getattr(tokenizer, "added_tokens_decoder", {}) or {}
    )
    size = len(tokenizer) if tokenizer is not None else target.num_embeddings
    order = [
        *sorted(special),
        *range(size, target.num_embeddings),
        *range(min(size, target.num_embeddings) - 1, -1, -1),
    ]
    for candidate in order:
        if (
            candidate < target.num_embeddings
            and candidate not in reserved
            and not (candidate < len(counts) and counts[candidate])
        ):
            return candidate
    raise TrainingError(
        "every token in the target's vocabulary is in use, so none is free as mask token; set mask_token_id"
    )


def _reserved_token_ids(target: Target, tokenizer: Any) -> dict[int, str]:
    """Return the ids that must not be the mask token, with the reason."""
    result: dict[int, str] = {}
    for source in (target.text_config, target.model.generation_config, tokenizer):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            ids = getattr(source, name, None)
            for token in ids if isinstance(ids, (list, tuple)) else [ids]:
                if token is not None:
                    result.setdefault(token, name)
    template = getattr(tokenizer, "chat_template", None) or ""
    for token, content in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items():
        if str(content) in str(template):
            result.setdefault(token, "part of the chat template")
    return result


def make_config(target: Target, settings: TrainingSettings, mask_token_id: int) -> DFlashConfig:
    """Make the configuration of a new draft, with the target's sizes unless the settings override them."""
    values = _config_values(target.text_config, settings, target.num_embeddings, target.name)
    return DFlashConfig(**values | {"mask_token_id": mask_token_id})


def check_target(settings: TrainingSettings, text_config: Any, name: str) -> None:
    """Check the settings of a new draft against its target's configuration, before the weights are loaded.

    Raises:
        TrainingError: they do not fit (taps, attention heads, convolution groups, ...); all problems are listed.
    """
    try:
        values = _config_values(text_config, settings, getattr(text_config, "vocab_size", None), name)
    except AttributeError:
        return  # nothing that a draft can be shaped after: what is missing is named once the target is loaded
    try:
        DFlashConfig(**values | {"mask_token_id": 0})
    except CheckpointError as error:
        raise TrainingError(f"the settings do not fit the target {name}: {error}") from error


def _config_values(text: Any, settings: TrainingSettings, vocab_size: int | None, name: str) -> dict[str, Any]:
    """Return the values of a new draft's configuration but for the mask token."""
    layers = settings.layers
    taps = settings.taps or default_taps(text.num_hidden_layers, settings.num_taps)
    heads = settings.num_attention_heads or text.num_attention_heads
    version_2 = {
        "conv_kernel_size": settings.conv_kernel_size,
        "conv_group_size": settings.conv_group_size,
        "selector_rank": settings.selector_rank,
        "selector_top_k": settings.selector_top_k,
    }
    sliding = settings.sliding_window is not None
    causal = settings.sliding_causal if settings.version == 1 else False
    return {
        "dflash_version": settings.version,
        "hidden_size": text.hidden_size,
        "intermediate_size": settings.intermediate_size or text.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.num_key_value_heads or getattr(text, "num_key_value_heads", heads) or heads,
        "head_dim": settings.head_dim or getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta or _rope_theta(text)},
        "vocab_size": vocab_size,
        "initializer_range": getattr(text, "initializer_range", 0.02),
        "block_size": settings.block_size,
        "target_layer_ids": taps,
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None) or None,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * layers,
        "sliding_window": settings.sliding_window,
        "layer_causal": [sliding and causal] * layers,
        "target_name_or_path": name,
        "target_hidden_size": text.hidden_size,
        "target_vocab_size": vocab_size,
        "target_num_hidden_layers": text.num_hidden_layers,
        # A draft has no special tokens of its own, so do not store transformers' defaults.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **(version_2 if settings.version == 2 else {}),
    }


def _rope_theta(text_config: Any) -> float:
    """Return the target's theta, or that of full attention if it differs by layer type.

    Scaling and M-RoPE sections are not inherited.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or 10000.0)


@torch.no_grad()
def copy_from_target(draft: DFlashDraftModel, target: Target) -> list[str]:
    """Initialize from the target's last attention layers instead of random weights.

    Draft layer i of n copies the projections and norms of the i-th of the target's last n attention layers, if the
    shapes match. `norm` copies the target's final norm, `hidden_norm` the input norm of the first copied layer, and
    `fc` starts as the mean of the taps (identity / n_taps for each).

    Returns:
        the names of the draft parameters that were set.
    """
    own = dict(draft.named_parameters())
    copied: list[str] = []

    def set_weight(name: str, value: torch.Tensor | None) -> None:
        if value is not None and value.is_floating_point() and value.shape == own[name].shape:
            own[name].copy_(value)
            copied.append(name)

    sources = [
        layer for layer in target.layers if getattr(getattr(layer, "self_attn", None), "q_proj", None) is not None
    ]
    sources = sources[-len(draft.layers) :]
    for index, source in enumerate(sources):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            set_weight(f"layers.{index}.{part}.weight", _weight(source, part))
        for part in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            set_weight(f"layers.{index}.{part}.weight", _weight(source, part))
        for part in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            set_weight(f"layers.{index}.{part}.weight", _norm_scale(source, part))
    set_weight("norm.weight", _norm_scale(target.model.get_decoder(), "norm"))
    if sources:
        set_weight("hidden_norm.weight", _norm_scale(sources[0], "input_layernorm"))
    taps, width = len(draft.config.target_layer_ids), draft.config.hidden_size
    if draft.config.target_hidden_size == width:
        set_weight("fc.weight", (torch.eye(width) / taps).repeat(1, taps))
    return copied


def _weight(module: nn.Module, path: str) -> torch.Tensor | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return getattr(module, "weight", None)


def _norm_scale(module: nn.Module, path: str) -> torch.Tensor | None:
    """Return the scale of an RMS norm by calling it on ones, because some model families store scale - 1."""
    for name in path.split("."):
        module = getattr(module, name, None)
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1:
        return None
    return module(torch.ones(1, 1, len(weight), dtype=weight.dtype, device=weight.device))[0, 0]


def check_warm_start(draft: DFlashDraftModel, target: Target, settings: TrainingSettings) -> None:
    """Check that the draft to start from matches the target and the settings that the user set.

    Raises:
        TrainingError: on a mismatch, naming both values.
    """
    config, text = draft.config, target.text_config
    required: Sequence[tuple[str, Any, Any]] = (
        ("hidden size", config.target_hidden_size or config.hidden_size, text.hidden_size),
        ("target layers", config.target_num_hidden_layers, text.num_hidden_layers),
    )
    for name, value, expected in required:
        if value is not None and value != expected:
            raise TrainingError(
                f"warm_start: the draft was made for a target with {name} {value}, but {target.name} has {expected}"
            )
    if draft.lm_head is not None:
        raise TrainingError(
            f"warm_start: the draft has its own head for {config.draft_vocab_size} tokens; only drafts that use the "
            "target's head can be trained"
        )
    if max(config.target_layer_ids) >= text.num_hidden_layers:
        raise TrainingError(
            f"warm_start: the draft taps layers {config.target_layer_ids}, but {target.name} has "
            f"{text.num_hidden_layers}"
        )
    check_warm_start_settings(config, settings)


def check_warm_start_settings(config: DFlashConfig, settings: TrainingSettings) -> None:
    """Check that no setting was given otherwise than the draft to start from has it, be it with the default value.

    Raises:
        TrainingError: the draft has other values; all are listed.
    """
    sliding = "sliding_attention" in config.layer_types
    fixed = {
        "version": config.dflash_version,
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "taps": list(config.target_layer_ids),
        "num_taps": len(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sliding_window": config.sliding_window if sliding else None,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    # These have no effect on other drafts, new ones included.
    if sliding and config.dflash_version == 1:
        fixed["sliding_causal"] = all(config.layer_causal)
    if config.dflash_version == 2:
        fixed |= {key: getattr(config, key) for key in VERSION_2_KEYS}
    problems = {}
    for name, value in fixed.items():
        requested = getattr(settings, name)
        requested = list(requested) if isinstance(requested, tuple) else requested
        if name in settings.given and requested not in (None, value):
            problems[name] = f"the draft has {name} {value}, but the settings have {requested}"
    if "initial_weights" in settings.given:
        problems["initial_weights"] = f"the draft has weights, but the settings have {settings.initial_weights!r} ones"
    if problems:
        raise TrainingError(f"warm_start: {'; '.join(problems.values())}; do not set {', '.join(problems)}")
