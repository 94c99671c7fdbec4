"""The draft before its first step: its shape, its taps, its mask token, its first weights.

Owns: the defaults that follow from a target (all of them written explicitly into the configuration), the choice and
check of a mask token, weights copied from the target, warm starts.

Does not know: data files beyond token counts, optimization.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.settings import TrainingSettings


def default_taps(num_target_layers: int, count: int) -> list[int]:
    """`count` target layers, evenly spread from layer 1 to the fourth last, as in the published drafts.

    Example:
        5 of 36 layers: 1, 9, 17, 25, 33. Targets of fewer than 6 layers are tapped from their first to their last
        layer.
    """
    first, last = (1, num_target_layers - 3) if num_target_layers >= 6 else (0, num_target_layers - 1)
    if count > last - first + 1:
        raise TrainingError(
            f"{count} taps do not fit between layers {first} and {last} of a target with {num_target_layers} layers; "
            "ask for fewer, or name them with `taps`"
        )
    if count == 1:
        return [(first + last) // 2]
    return [round(first + at * (last - first) / (count - 1)) for at in range(count)]


def choose_mask_token(target: Target, tokenizer: Any, counts: torch.LongTensor, wanted: int | None) -> int:
    """The id that stands for "to be proposed": one that the target can embed and that no text contains.

    Of the unused ids the tokenizer's own special tokens come first, then ids that the tokenizer does not know, then
    any other.

    Args:
        counts: `(vocabulary,)` how often each id occurs in the training texts.
        wanted: the user's choice, only checked.

    Raises:
        TrainingError: the wanted id is outside the vocabulary, ends or pads texts, or occurs in them; or no id is free.
    """
    known = _token_ids_with_a_meaning(target, tokenizer)
    if wanted is not None:
        if not 0 <= wanted < target.num_embeddings:
            raise TrainingError(
                f"mask_token_id {wanted} is outside the target's {target.num_embeddings} embedding rows"
            )
        if wanted in known:
            raise TrainingError(
                f"mask_token_id {wanted} already means something ({known[wanted]}); choose an unused id"
            )
        if wanted < len(counts) and counts[wanted]:
            raise TrainingError(
                f"mask_token_id {wanted} occurs {int(counts[wanted])} times in the training texts; choose an unused id"
            )
        return wanted
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
            and candidate not in known
            and not (candidate < len(counts) and counts[candidate])
        ):
            return candidate
    raise TrainingError(
        "every token of the target's vocabulary is in use, so none is free as mask token; name one with mask_token_id"
    )


def _token_ids_with_a_meaning(target: Target, tokenizer: Any) -> dict[int, str]:
    """Ids that must not be the mask token, and what they are."""
    result: dict[int, str] = {}
    for source in (target.text_config, target.model.generation_config, tokenizer):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            found = getattr(source, name, None)
            for token in found if isinstance(found, (list, tuple)) else [found]:
                if token is not None:
                    result.setdefault(token, name)
    template = getattr(tokenizer, "chat_template", None) or ""
    for token, content in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items():
        if str(content) in str(template):
            result.setdefault(token, "part of the chat template")
    return result


def make_config(target: Target, settings: TrainingSettings, mask_token_id: int) -> DFlashConfig:
    """The configuration of a new draft: sizes of the target unless the settings say otherwise."""
    text = target.text_config
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
    return DFlashConfig(
        dflash_version=settings.version,
        hidden_size=text.hidden_size,
        intermediate_size=settings.intermediate_size or text.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=settings.num_key_value_heads or getattr(text, "num_key_value_heads", heads) or heads,
        head_dim=settings.head_dim or getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta or _rope_theta(text)},
        vocab_size=target.num_embeddings,
        initializer_range=getattr(text, "initializer_range", 0.02),
        block_size=settings.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        final_logit_softcapping=getattr(text, "final_logit_softcapping", None) or None,
        layer_types=["sliding_attention" if sliding else "full_attention"] * layers,
        sliding_window=settings.sliding_window,
        layer_causal=[sliding and causal] * layers,
        target_name_or_path=target.name,
        target_hidden_size=text.hidden_size,
        target_vocab_size=target.num_embeddings,
        target_num_hidden_layers=text.num_hidden_layers,
        # A draft has no special tokens of its own; transformers' defaults would be read as such.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **(version_2 if settings.version == 2 else {}),
    )


def _rope_theta(text_config: Any) -> float:
    """The target's theta; where it has one per layer type, that of full attention.

    Scaling and M-RoPE sections are not inherited.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or 10000.0)


@torch.no_grad()
def copy_from_target(draft: DFlashDraftModel, target: Target) -> list[str]:
    """Start from the target's last attention layers instead of random weights.

    Draft layer i of n takes the projections and norms of the i-th of the target's last n layers with attention,
    wherever the shapes agree; `norm` takes the target's final norm, `hidden_norm` the input norm of the first layer
    copied, and `fc` starts as the mean of the taps (an identity over n_taps for each).

    Returns:
        the names of the draft's parameters that were set.
    """
    own = dict(draft.named_parameters())
    done: list[str] = []

    def set_weight(name: str, value: torch.Tensor | None) -> None:
        if value is not None and value.is_floating_point() and value.shape == own[name].shape:
            own[name].copy_(value)
            done.append(name)

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
    return done


def _weight(module: nn.Module, path: str) -> torch.Tensor | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return getattr(module, "weight", None)


def _norm_scale(module: nn.Module, path: str) -> torch.Tensor | None:
    """What an RMS norm multiplies by, found by calling it on ones: some families store the scale less 1."""
    for name in path.split("."):
        module = getattr(module, name, None)
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1:
        return None
    return module(torch.ones(1, 1, len(weight), dtype=weight.dtype, device=weight.device))[0, 0]


def check_warm_start(draft: DFlashDraftModel, target: Target, settings: TrainingSettings) -> None:
    """A draft to go on with must fit the target and the settings that were named.

    Raises:
        TrainingError: naming both sides.
    """
    config, text = draft.config, target.text_config
    facts: Sequence[tuple[str, Any, Any]] = (
        ("hidden size", config.target_hidden_size or config.hidden_size, text.hidden_size),
        ("target layers", config.target_num_hidden_layers, text.num_hidden_layers),
    )
    for name, found, needed in facts:
        if found is not None and found != needed:
            raise TrainingError(
                f"warm_start: the draft was made for a target with {name} {found}, and {target.name} has {needed}"
            )
    if draft.lm_head is not None:
        raise TrainingError(
            f"warm_start: the draft has a head of its own for {config.draft_vocab_size} tokens; only drafts that "
            "borrow the target's head can be trained on"
        )
    if max(config.target_layer_ids) >= text.num_hidden_layers:
        raise TrainingError(
            f"warm_start: the draft taps layers {config.target_layer_ids}, and {target.name} has "
            f"{text.num_hidden_layers}"
        )
    for name, found in (
        ("block_size", config.block_size),
        ("taps", config.target_layer_ids),
        ("version", config.dflash_version),
    ):
        wanted = getattr(settings, name)
        if wanted not in (None, found) and name in settings.named:
            raise TrainingError(
                f"warm_start: the draft has {name} {found}, and the settings ask for {wanted}; leave {name} out"
            )
