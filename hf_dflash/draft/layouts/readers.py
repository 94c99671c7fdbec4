"""One function per published layout: its `config.json` in, canonical values out.

Includes what a layout leaves implicit: causality, window, tap numbering.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_dflash.draft.configuration_dflash import FOREIGN_KEYS, DFlashConfig, format_value, is_integer
from hf_dflash.draft.layouts.reading import Reading, Scopes, architectures, submapping
from hf_dflash.draft.layouts.refusals import OPTIONS, reject_options
from hf_dflash.draft.layouts.rope import read_rope

# Names that published layouts share with the canonical form.
NETWORK_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "max_position_embeddings",
    "initializer_range",
    "vocab_size",
)
OUTPUT_KEYS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
VERSION_2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# Qwen3's default `max_window_layers`: with sliding enabled and no list of types, layers from this one on slide.
_MAX_WINDOW_LAYERS = 28


def is_version_2(raw: Mapping) -> bool:
    """Return whether a `config.json` in one of z-lab's layouts describes a DFlash 2 draft."""
    projector = submapping(raw, "dflash_config").get("projector_type")
    return projector == "dflash2" or any("dflash2" in name.lower() for name in architectures(raw))


def read_z_lab(raw: Mapping) -> Reading:
    """Read layouts A, B, D and F: a Qwen3 configuration with a `dflash_config`; a key may be in either."""
    reading = Reading()
    nested = reading.mapping(raw, "dflash_config")
    scopes = [("dflash_config.", nested), ("", raw)]
    look = Scopes(reading, scopes)
    look.take((*NETWORK_KEYS, *OUTPUT_KEYS, *VERSION_2_KEYS, "target_hidden_size"))
    look.take(("block_size", "mask_token_id", "target_layer_ids"))
    look.take_as("target_num_hidden_layers", "num_target_layers", "target_num_hidden_layers")
    reading.values["dflash_version"] = 2 if is_version_2(raw) else 1

    look.take_as("sliding_window", "swa_window_size", "sliding_window")
    types = look.take_as("layer_types", "layer_types")
    types = _default_layer_types(reading, raw) if types is None else types
    use_swa = reading.flag(nested, "use_swa", "dflash_config.")
    if use_swa and isinstance(types, list) and "sliding_attention" not in types:
        # Model-Optimizer lists full layers, and this flag makes all of them slide.
        types = ["sliding_attention"] * len(types)
    _set_layers(reading, types)
    # `is_causal` at top level, then `causal` in `dflash_config`; without either, the layer type decides.
    for place, causal in (("is_causal", raw.get("is_causal")), ("dflash_config.causal", nested.get("causal"))):
        if causal is not None:
            _set_causal(reading, place, causal)
            break
    known = look.requested | OPTIONS | {"use_swa", "causal"}
    reading.warnings += [
        f"`dflash_config.{key}` ({format_value(value)}) is unknown and is ignored."
        for key, value in nested.items()
        if value is not None and key not in known
    ]
    _read_common(reading, raw, scopes, rope_scopes=[("", raw)], whole_heads_only=False)
    return reading


def read_muse(raw: Mapping) -> Reading:
    """Read layout C, transformers' MuseGlimmerAssistant: all at top level, every layer slides and none is causal."""
    reading = Reading()
    scopes = [("", raw)]
    look = Scopes(reading, scopes)
    look.take((*NETWORK_KEYS, *OUTPUT_KEYS, "block_size", "mask_token_id", "target_layer_ids", "sliding_window"))
    look.take_as("target_num_hidden_layers", "num_target_layers")
    types = look.take_as("layer_types", "layer_types")
    layers = reading.num_layers()
    _set_layers(reading, ["sliding_attention"] * layers if types is None and layers is not None else types)
    _set_causal(reading, "model_type", False)
    _read_common(reading, raw, scopes, rope_scopes=scopes, whole_heads_only=False)
    return reading


def read_speculators(raw: Mapping) -> Reading:
    """Read layout G: the decoder in `transformer_layer_config`, 1-based tap ids, possibly a smaller vocabulary."""
    reading = Reading()
    inner = reading.mapping(raw, "transformer_layer_config")
    scopes = [("transformer_layer_config.", inner), ("", raw)]
    Scopes(reading, scopes).take((*NETWORK_KEYS, "layer_types", "sliding_window"))
    look = Scopes(reading, [("", raw)])
    look.take(("block_size", "mask_token_id", "target_hidden_size", "draft_vocab_size", *OUTPUT_KEYS))
    look.take(VERSION_2_KEYS)
    version = reading.values["dflash_version"] = 2 if raw.get("speculators_model_type") == "dflash2" else 1

    ids = look.take_as("target_layer_ids", "aux_hidden_state_layer_ids")
    if isinstance(ids, list) and all(is_integer(layer) for layer in ids):
        # In speculators 0 is the embedding: its 2 is hidden_states[2], the output of decoder layer 1.
        reading.values["target_layer_ids"] = [layer - 1 for layer in ids]
        reading.places["target_layer_ids"] += ", each minus 1"
    types = reading.values.get("layer_types")
    _set_layers(reading, _default_layer_types(reading, inner, "transformer_layer_config.") if types is None else types)
    # Full layers see the whole block; sliding ones do if this key is set, by default in DFlash 2 only.
    free = reading.flag(raw, "sliding_window_non_causal")
    if free or (free is None and version == 2):
        _set_causal(reading, "sliding_window_non_causal", False)

    if reading.values.get("draft_vocab_size") == reading.values.get("vocab_size"):
        # The full vocabulary: the target's head is used, unless the file has one.
        reading.values.pop("draft_vocab_size", None)
    verifier = reading.mapping(reading.mapping(raw, "speculators_config"), "verifier", "speculators_config.")
    reading.values["target_name_or_path"] = verifier.get("name_or_path")
    _read_common(reading, raw, scopes, rope_scopes=scopes, whole_heads_only=True)
    return reading


def read_canonical(raw: Mapping) -> Reading:
    """Read hf_dflash's own form; other keys (`auto_map`, `architectures`, ...) are left to transformers."""
    reading = Reading()
    names = [*DFlashConfig.__dataclass_fields__, *FOREIGN_KEYS]
    inherited = PreTrainedConfig.__dataclass_fields__
    reading.values = {name: raw[name] for name in names if name in raw and name not in inherited}
    reading.places = {name: f"`{name}`" for name in names}
    rope = submapping(raw, "rope_parameters")
    reading.places |= {key: f"`rope_parameters.{key}`" for key in ("rope_theta", "rope_type", *rope)}
    reject_options(reading, [("", raw)])
    return reading


def _default_layer_types(reading: Reading, raw: Mapping, prefix: str = "") -> list[str] | None:
    """Apply Qwen3's rule for a configuration without layer types."""
    layers = reading.num_layers()
    if layers is None:
        return None
    first = reading.typed(raw, "max_window_layers", is_integer, "an integer", prefix)
    first = _MAX_WINDOW_LAYERS if first is None else first
    first = first if reading.flag(raw, "use_sliding_window", prefix) else layers
    return ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]


def _set_layers(reading: Reading, types: Any) -> None:
    if types is not None:
        reading.values["layer_types"] = types
    if not isinstance(types, list) or "sliding_attention" not in types:
        # Qwen3 configurations keep the target's window even if no layer slides.
        reading.values.pop("sliding_window", None)


def _set_causal(reading: Reading, place: str, causal: Any) -> None:
    """Set the same causality for every layer."""
    if not isinstance(causal, bool):
        reading.problems.append(f"`{place}` must be true, false or null; found {format_value(causal)}.")
    layers = reading.num_layers()
    if layers is not None:
        reading.values["layer_causal"] = [bool(causal)] * layers


def _read_common(
    reading: Reading,
    raw: Mapping,
    scopes: list[tuple[str, Mapping]],
    *,
    rope_scopes: list[tuple[str, Mapping]],
    whole_heads_only: bool,
) -> None:
    """Read what all published layouts share: RoPE, unsupported options, the target's vocabulary, special tokens."""
    read_rope(reading, rope_scopes, whole_heads_only)
    reject_options(reading, scopes)
    cap = reading.values.get("final_logit_softcapping")
    if cap == 0 and not isinstance(cap, bool):
        # Published configurations use 0 for "no cap".
        del reading.values["final_logit_softcapping"]
    if reading.values.get("vocab_size") is not None:
        reading.values["target_vocab_size"] = reading.values["vocab_size"]
    for key in ("eos_token_id", "pad_token_id"):
        needed = "a token id, a list of them"
        ids = [reading.typed(mapping, key, _is_special, needed, prefix) for prefix, mapping in scopes]
        special = next((found for found in ids if found is not None), None)
        reading.warnings += mask_warnings(reading.values.get("mask_token_id"), key, special)


def _is_special(value: Any) -> bool:
    """Return whether a value may be `eos_token_id` or `pad_token_id`."""
    return is_integer(value) or (isinstance(value, list) and all(map(is_integer, value)))


def mask_warnings(mask_token_id: Any, key: str, special: Any) -> list[str]:
    """Warn if the mask token is also a special token of the text (an id, a list of ids, or None)."""
    ids = special if isinstance(special, (list, tuple)) else [special]
    if not is_integer(mask_token_id) or mask_token_id not in ids:
        return []
    return [
        f"`mask_token_id` ({mask_token_id}) is also `{key}`. A draft is trained with a dedicated mask token: if this "
        "id is a mistake, hardly any candidate will be accepted. Check it with the draft's author."
    ]
