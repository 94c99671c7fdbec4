"""Reads the RoPE values of a draft from wherever a layout keeps them.

Each key is looked up in `rope_parameters`, then `rope_scaling`, then at top level. M-RoPE keys are dropped, because a
draft's positions are one-dimensional. Whether the values are valid is checked by the canonical configuration.
"""

from collections.abc import Mapping
from typing import Any

from hf_dflash.draft.configuration_dflash import LAYER_TYPES, ROPE_REQUIRED_KEYS, format_value, is_number
from hf_dflash.draft.layouts.reading import Reading, format_place

_OPTIONAL_KEYS = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
    "proportional": ("partial_rotary_factor",),
}
_TOP_LEVEL_KEYS = ("rope_theta", "rope_type", "partial_rotary_factor", "original_max_position_embeddings")
# Inherited from a multimodal target; a draft's positions are one-dimensional even if its target's are not.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
_KNOWN_KEYS = {
    "type",
    *_TOP_LEVEL_KEYS,
    *_MROPE_KEYS,
    *(key for keys in (*ROPE_REQUIRED_KEYS.values(), *_OPTIONAL_KEYS.values()) for key in keys),
}


def read_rope(reading: Reading, scopes: list[tuple[str, Mapping]], whole_heads_only: bool) -> None:
    """Put `rope_parameters` into the values of a reading, and the place of each of its keys into its places.

    Args:
        reading: already holds `layer_types`, if there are any.
        scopes: pairs of a prefix for messages and a dictionary to search; the first match wins.
        whole_heads_only: reject a `partial_rotary_factor` below 1 for default RoPE too. z-lab's network ignores this
            inherited key and rotates whole heads; a speculators draft may have been trained either way.
    """
    found: dict[str, Any] = {}
    looked = []
    for place, mapping in _sources(reading, scopes):
        looked.append(format_place(place, "rope_theta"))
        for key, value in mapping.items():
            if key not in _KNOWN_KEYS and value is not None:
                reading.problems.append(f"`{place}{key}` ({format_value(value)}) is an unknown RoPE option.")
            canonical = "rope_type" if key == "type" else key
            if key in _KNOWN_KEYS and value is not None and canonical not in found:
                found[canonical] = value
                reading.places[canonical] = format_place(place, key)
    reading.places.setdefault("rope_theta", " and ".join(looked))

    rope_type = found.get("rope_type", "default")
    if rope_type == "mrope":
        rope_type = found["rope_type"] = "default"
    partial = found.get("partial_rotary_factor")
    if partial is not None and not is_number(partial):
        reading.problems.append(
            f"{reading.places['partial_rotary_factor']} must be a number or null; found {format_value(partial)}."
        )
    elif partial not in (None, 1) and rope_type != "proportional" and (whole_heads_only or rope_type != "default"):
        reading.problems.append(
            f"{reading.places['partial_rotary_factor']} is {partial!r}: rotating only part of a head is not supported."
        )
    kept = ["rope_theta", "rope_type"]
    if isinstance(rope_type, str):
        kept += [*ROPE_REQUIRED_KEYS.get(rope_type, ()), *_OPTIONAL_KEYS.get(rope_type, ())]
    reading.values["rope_parameters"] = {key: found[key] for key in kept if key in found}


def _sources(reading: Reading, scopes: list[tuple[str, Mapping]]) -> list[tuple[str, Mapping]]:
    """Return the dictionaries that may hold RoPE values, in lookup order, each with its prefix."""
    nested = [
        _by_layer_type(reading, f"{prefix}{key}.", reading.mapping(raw, key, prefix))
        for key in ("rope_parameters", "rope_scaling")
        for prefix, raw in scopes
    ]
    return [*nested, *((prefix, {key: raw.get(key) for key in _TOP_LEVEL_KEYS}) for prefix, raw in scopes)]


def _by_layer_type(reading: Reading, place: str, found: Mapping) -> tuple[str, Mapping]:
    """Resolve a dictionary keyed by layer type; the draft's layers must agree on one entry."""
    entries = {kind: found[kind] for kind in LAYER_TYPES if isinstance(found.get(kind), Mapping)}
    if not entries:
        return place, found
    layer_types = reading.values.get("layer_types")
    layer_types = layer_types if isinstance(layer_types, list) else LAYER_TYPES
    used = [kind for kind in entries if kind in layer_types]
    if not used:
        return place, {}
    if any(entries[kind] != entries[used[0]] for kind in used):
        reading.problems.append(
            f"`{place.removesuffix('.')}` gives {' and '.join(used)} layers different values; a draft has one RoPE for "
            "all layers."
        )
    return f"{place}{used[0]}.", entries[used[0]]
