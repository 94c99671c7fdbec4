"""Translates every published layout of a DFlash checkpoint into the canonical configuration.

The table of layouts is here, `readers` knows where each layout keeps its values, `refusals` what is not supported. Of
tensors only names and shapes are used. Reading collects problems, so that `inspect` can list all of them;
`to_canonical` raises.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_dflash.draft.configuration_dflash import MAXIMA, DFlashConfig, format_value, is_integer, join_problems
from hf_dflash.draft.errors import CheckpointError
from hf_dflash.draft.layouts.readers import (
    NETWORK_KEYS,
    OUTPUT_KEYS,
    VERSION_2_KEYS,
    is_version_2,
    mask_warnings,
    read_canonical,
    read_muse,
    read_speculators,
    read_z_lab,
)
from hf_dflash.draft.layouts.reading import Reading, architectures, submapping
from hf_dflash.draft.layouts.refusals import looks_like_target, unsupported_family

Shapes = Mapping[str, tuple[int, ...]]

_SWAPPED = (
    " It looks like a target: if target and draft were swapped, swap them back (on the command line, `--target` takes "
    "the target and `--draft` the draft)."
)


@dataclass(frozen=True)
class Layout:
    """One published form of a draft checkpoint.

    name: the value of `DFlashConfig.source_layout`. description: for messages. matches: whether a `config.json` has
    this layout. read: reads its values. prefixes: (published, canonical) prefixes of tensor names. unused: tensors that
    only training or another runtime needs.
    """

    name: str
    description: str
    matches: Callable[[Mapping], bool]
    read: Callable[[Mapping], Reading]
    prefixes: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()

    def rename(self, tensor: str) -> str | None:
        """Return the canonical name of a published tensor, or None if a draft does not use it."""
        if tensor in self.unused or tensor.endswith("rotary_emb.inv_freq"):
            return None
        for published, canonical in self.prefixes:
            if tensor.startswith(published):
                return canonical + tensor.removeprefix(published)
        # The authors' module stores the selector's codebooks as embeddings, their files as bare matrices.
        return tensor.removesuffix(".weight") if tensor.endswith("_codebook.weight") else tensor


def _nested_has(*keys: str) -> Callable[[Mapping], bool]:
    return lambda raw: any(key in submapping(raw, "dflash_config") for key in keys)


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


# The first match wins. `model_type` does not identify z-lab's drafts: theirs is `qwen3`.
LAYOUTS = (
    Layout(
        "canonical",
        "hf_dflash's own form",
        lambda raw: raw.get("model_type") == DFlashConfig.model_type and "dflash_version" in raw,
        read_canonical,
    ),
    Layout(
        "speculators",
        "speculators",
        lambda raw: raw.get("speculators_model_type") in ("dflash", "dflash2"),
        read_speculators,
        unused=("t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
    ),
    Layout(
        "muse",
        "Muse Glimmer assistant",
        lambda raw: raw.get("model_type") == "muse_glimmer_assistant",
        read_muse,
        prefixes=(("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
    ),
    Layout("dflash2", "z-lab DFlash 2", is_version_2, read_z_lab),
    Layout("modelopt", "NVIDIA Model-Optimizer", _nested_has("use_swa", "swa_window_size", "causal"), read_z_lab),
    Layout("z-lab-nested", "z-lab, block size in dflash_config", _nested_has("block_size"), read_z_lab),
    Layout(
        "z-lab",
        "z-lab, block size at top level",
        lambda raw: isinstance(raw.get("dflash_config"), Mapping) or "DFlashDraftModel" in architectures(raw),
        read_z_lab,
    ),
)


def recognize(raw: Mapping) -> Layout | None:
    """Return the layout of a `config.json`, or None for an ordinary model or an unsupported relative of DFlash."""
    if unsupported_family(raw):
        return None
    return next((layout for layout in LAYOUTS if layout.matches(raw)), None)


def read(raw: Mapping, shapes: Shapes | None = None) -> tuple[Layout, Reading]:
    """Recognize and read a `config.json`, collecting its problems.

    Args:
        raw: the parsed `config.json`.
        shapes: published tensor names to shapes, if the weights are available. Without them, the draft's own embeddings
            and its own head for the full vocabulary cannot be detected.

    Raises:
        CheckpointError: it is not a DFlash draft, or a relative that is not supported yet.
    """
    family = unsupported_family(raw)
    if family:
        raise CheckpointError(
            f"This is a {family} draft, a relative of DFlash that is not supported yet. Use a DFlash or DFlash 2 draft."
        )
    layout = recognize(raw)
    if layout is None:
        kind = raw.get("speculators_model_type") or raw.get("model_type") or "without model_type"
        raise CheckpointError(
            f"This is not a DFlash draft ({kind if isinstance(kind, str) else format_value(kind)}, architectures "
            f"{format_value(architectures(raw))}): its config.json has no "
            "`dflash_config`, no `speculators_model_type` of dflash or dflash2 and no architecture of a published "
            f"draft. An ordinary model cannot propose blocks.{_SWAPPED if looks_like_target(raw) else ''}"
        )
    reading = layout.read(raw)
    for key in ("model_type", "speculators_model_type"):
        reading.typed(raw, key, lambda value: isinstance(value, str), "a string")
    reading.typed(raw, "architectures", _is_list_of_strings, "a list of strings")
    own = raw.get("source_layout")
    reading.values["source_layout"] = layout.name if own is None else own
    if shapes is not None:
        _apply_shapes(reading, {layout.rename(name): tuple(shape) for name, shape in shapes.items()})
    return layout, reading


def _apply_shapes(reading: Reading, shapes: Mapping[str | None, tuple[int, ...]]) -> None:
    """Add what only the tensors show: own embeddings, an own head, and whether `fc` matches the number of taps."""
    values = reading.values
    values["own_embeddings"] = "embed_tokens.weight" in shapes
    head, reduced = shapes.get("lm_head.weight"), values.get("draft_vocab_size")
    if head is None and reduced is not None:
        reading.problems.append(
            f"`draft_vocab_size` is {format_value(reduced)}, but the checkpoint has no `lm_head.weight` for it."
        )
    if head and reduced is None:
        values["draft_vocab_size"] = head[0]
        reading.places["draft_vocab_size"] = "the shape of `lm_head.weight`"

    taps, fc = values.get("target_layer_ids"), shapes.get("fc.weight")
    width = values.get("target_hidden_size") or values.get("hidden_size")
    if fc is None or len(fc) != 2 or not isinstance(taps, list):
        return
    if not is_integer(width) or not 0 < width <= MAXIMA["hidden_size"]:
        return
    if len(taps) * width != fc[1]:
        fits = f"{fc[1] // width} taps" if fc[1] % width == 0 else "not a whole number of taps"
        reading.problems.append(
            f"`target_layer_ids` {format_value(taps)} does not fit `fc.weight`: {len(taps)} taps of width {width} make "
            f"{len(taps) * width} inputs, but `fc.in_features` is {fc[1]} ({fits}). Get the taps from the draft's "
            "author."
        )


def to_canonical(raw: Mapping, shapes: Shapes | None = None) -> DFlashConfig:
    """Return the canonical configuration of a published `config.json` in any layout; arguments as in `read`.

    Raises:
        CheckpointError: names every value that is missing, invalid or not supported, and where it was looked for.
    """
    layout, reading = read(raw, shapes)
    problems = reading.all_problems()
    if problems:
        raise CheckpointError(join_problems(f"This draft ({layout.description}) cannot be used", problems))
    return DFlashConfig(**reading.values)


__all__ = [
    "LAYOUTS",
    "NETWORK_KEYS",
    "OUTPUT_KEYS",
    "VERSION_2_KEYS",
    "Layout",
    "Reading",
    "Shapes",
    "mask_warnings",
    "read",
    "recognize",
    "to_canonical",
    "unsupported_family",
]
