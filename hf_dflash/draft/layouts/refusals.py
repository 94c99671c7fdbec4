"""Unsupported features of published drafts: options that change what a draft computes, and relatives of DFlash.

Each is rejected by name, because ignoring one would only show as low acceptance.
"""

from collections.abc import Iterable, Mapping

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_dflash.draft.configuration_dflash import format_value
from hf_dflash.draft.layouts.reading import Reading, architectures, format_place, submapping

# key, the values that have no effect, what any other value means
_OPTIONS = {
    "projector_type": (("dflash", "dflash2"), "an unknown kind of draft"),
    "attention_sink_bias": ((False,), "learned attention sinks"),
    "add_swa_attention_sink_bias": ((False,), "learned attention sinks"),
    "is_neox_style": ((True,), "interleaved RoPE"),
    "rope_interleave": ((False,), "interleaved RoPE"),
    "rope_interleaved": ((False,), "interleaved RoPE"),
    "use_aux_hidden_state": ((True,), "a draft that does not read the target's layers"),
    "sample_from_anchor": ((False,), "candidates shifted by one, the first read at the anchor's own position"),
    "shift_label": ((False,), "candidates shifted by one position"),
    "norm_before_fc": ((False,), "a norm before `fc`"),
    "logit_scale": (
        (1.0,),
        "a logit scale under a name that no published DFlash draft uses (`output_multiplier` is supported)",
    ),
    "quantization_config": ((), "quantized draft weights; use the bf16 draft (the target may stay quantized)"),
}
OPTIONS = frozenset(_OPTIONS)


def reject_options(reading: Reading, scopes: Iterable[tuple[str, Mapping]]) -> None:
    """Record a problem for every unsupported option."""
    for prefix, mapping in scopes:
        for key, (harmless, meaning) in _OPTIONS.items():
            value = mapping.get(key)
            if value is not None and not any(_equal(value, one) for one in harmless):
                found = f"{format_place(prefix, key)} is {format_value(value)}"
                reading.problems.append(f"{found}, which is not supported: {meaning}.")


def _equal(value: object, other: object) -> bool:
    """Compare two values; unlike in Python, 0 is not False and 1.0 is not True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def looks_like_target(raw: Mapping) -> bool:
    """Return whether a `config.json` that is no draft describes a model that could be a target."""
    names, model_type = architectures(raw), raw.get("model_type")
    if raw.get("speculators_model_type") is not None or not isinstance(model_type, str):
        return False
    if names:
        return any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def unsupported_family(raw: Mapping) -> str | None:
    """Return the name of the unsupported relative of DFlash that a `config.json` describes, else None."""
    nested = submapping(raw, "dflash_config")
    kinds = [nested.get("projector_type"), raw.get("projector_type"), raw.get("speculators_model_type")]
    names = " ".join(architectures(raw)).lower()
    model_type = str(raw.get("model_type", "")).lower()
    families = {
        "Domino": "domino" in kinds or "domino" in names,
        "DSpark": "dspark" in kinds or "dspark" in names or "markov_rank" in raw or "markov_rank" in nested,
        "LiLiCorr": "lilicorr" in kinds or "lilicorr" in names,
        "Laguna": "dflashlaguna" in names or (model_type == "laguna" and bool(nested)),
        "MiMo": ("mimo" in names or model_type.startswith("mimo")) and bool(nested),
    }
    return next((family for family, applies in families.items() if applies), None)
