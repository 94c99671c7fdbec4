"""What a published draft may ask for and hf_dflash does not do.

Owns: the names of DFlash's relatives, and the options that change what a draft computes. Each is refused by name, since
ignoring one would only show as low acceptance.

Does not know: where layouts keep the values that are supported.
"""

from collections.abc import Iterable, Mapping

from hf_dflash.draft.layouts.reading import Reading, architectures, spoken, submapping

# key, the values that change nothing, what any other value asks for
_OPTIONS = {
    "projector_type": (("dflash", "dflash2"), "a kind of draft that is not known here"),
    "attention_sink_bias": ((False,), "learned attention sinks"),
    "add_swa_attention_sink_bias": ((False,), "learned attention sinks"),
    "is_neox_style": ((True,), "interleaved RoPE"),
    "rope_interleave": ((False,), "interleaved RoPE"),
    "rope_interleaved": ((False,), "interleaved RoPE"),
    "use_aux_hidden_state": ((True,), "a draft that does not read the target's layers"),
    "sample_from_anchor": ((False,), "a candidate read at the anchor's own position, so that all are shifted by one"),
    "shift_label": ((False,), "candidates shifted by one position"),
    "norm_before_fc": ((False,), "a norm in front of `fc`"),
    "logit_scale": (
        (1.0,),
        "a logit scale under a name that no published DFlash draft uses (`output_multiplier` is known)",
    ),
    "quantization_config": ((), "quantized draft weights; take the bf16 draft (the target may stay quantized)"),
}
OPTIONS = frozenset(_OPTIONS)


def refuse_options(reading: Reading, scopes: Iterable[tuple[str, Mapping]]) -> None:
    """Notes a problem for every option that cannot be honored."""
    for prefix, mapping in scopes:
        for key, (harmless, meaning) in _OPTIONS.items():
            value = mapping.get(key)
            if value is not None and value not in harmless:
                reading.problems.append(f"{spoken(prefix, key)} is {value!r}, which asks for {meaning}: not supported.")


def unsupported_family(raw: Mapping) -> str | None:
    """The relative of DFlash that a `config.json` describes and that is not supported yet; None for all else."""
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
