"""`inspect_draft`: what a draft checkpoint is, what it expects of its target, and what is wrong with it.

All of this comes from the configuration and the file headers; no weight is read.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import CheckpointError, DraftDtypeError
from hf_dflash.draft.loading import (
    Checkpoint,
    TargetFacts,
    is_draft_checkpoint,
    pairing_problems,
    pairing_warnings,
    read_checkpoint,
    resolve_dtype,
)

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_BLOCK = ("block_size", "mask_token_id", "target_layer_ids", "num_hidden_layers", "layer_types", "layer_causal")
_OUTPUT = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "draft_vocab_size")
_VERSION_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass
class Inspection:
    """The result of `inspect_draft`.

    draft: the checkpoint's values by canonical key, as far as they could be read. expects: its values about its target.
    target: the values of the given target, None if none was given. pairs: whether the two match; None if that could
    not be determined. problems: what prevents the use of the draft (or the pair). warnings: what is unusual.
    """

    name: str
    draft: dict[str, Any] = field(default_factory=dict)
    expects: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] | None = None
    pairs: bool | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return asdict(self)


def inspect_draft(name_or_path: str | Path, target: str | Path | None = None, **hub_options: Any) -> Inspection:
    """Inspect a draft in any layout; a folder with only a `config.json` is enough.

    Args:
        name_or_path: a folder, or the id of a Hub repository.
        target: a target to check it against: a folder or a Hub id, of which only the configuration is read.
        hub_options: for the draft, as for `load_draft`.

    Returns:
        An `Inspection`. Problems with the checkpoint are listed and never raised.
    """
    inspection = Inspection(str(name_or_path))
    facts = _read_target(target, inspection) if target is not None else None
    try:
        checkpoint = read_checkpoint(name_or_path, **hub_options)
    except CheckpointError as error:
        inspection.problems.append(str(error))
        return inspection
    inspection.problems += checkpoint.problems
    inspection.warnings += checkpoint.reading.warnings
    _describe(checkpoint, inspection)
    if facts is not None and not checkpoint.problems:
        config = DFlashConfig(**checkpoint.reading.values, name_or_path=checkpoint.name)
        mismatches = pairing_problems(config, facts)
        inspection.pairs = not mismatches
        inspection.problems += mismatches
        inspection.warnings += pairing_warnings(config, facts)
    return inspection


def _describe(checkpoint: Checkpoint, inspection: Inspection) -> None:
    values = checkpoint.reading.values
    if not checkpoint.problems:
        # Add what the canonical form derives: head width, layer types, causality.
        values = DFlashConfig(**values).to_dict()
    draft = inspection.draft
    draft["layout"] = checkpoint.layout.name
    draft["layout_description"] = checkpoint.layout.description
    draft["dflash_version"] = values.get("dflash_version")
    draft |= {key: values.get(key) for key in (*_BLOCK, "sliding_window", *_SIZES, "rope_parameters", *_OUTPUT)}
    draft["own_embeddings"] = values.get("own_embeddings") if checkpoint.tensors else None
    if draft["dflash_version"] == 2:
        draft |= {key: values.get(key) for key in _VERSION_2}
    draft["stored_dtypes"] = sorted({info.dtype for info in checkpoint.tensors.values()})
    draft["parameters"] = (
        sum(math.prod(info.shape) for info in checkpoint.tensors.values()) if checkpoint.tensors else None
    )
    try:
        draft["dtype"] = str(resolve_dtype(checkpoint)).removeprefix("torch.")
    except DraftDtypeError as error:
        draft["dtype"] = None
        inspection.problems.append(str(error))
    if not checkpoint.tensors and not checkpoint.problems:
        inspection.warnings.append("The checkpoint has no weights: only the configuration was checked.")

    inspection.expects = {
        "name_or_path": values.get("target_name_or_path"),
        "hidden_size": values.get("target_hidden_size") or values.get("hidden_size"),
        "vocab_size": values.get("target_vocab_size"),
        "num_hidden_layers": values.get("target_num_hidden_layers"),
        "target_layer_ids": values.get("target_layer_ids"),
    }


def _read_target(target: str | Path, inspection: Inspection) -> TargetFacts | None:
    if is_draft_checkpoint(target):
        inspection.problems.append(
            f"{target} is given as the target, but it is a DFlash draft. Check whether target and draft are swapped."
        )
        return None
    try:
        facts = TargetFacts.of_config(str(target), AutoConfig.from_pretrained(target))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, StrictDataclassError) as error:
        inspection.problems.append(f"The configuration of the target {target} cannot be read: {error}")
        return None
    inspection.target = {
        key: getattr(facts, key) for key in ("name", "hidden_size", "vocab_size", "num_hidden_layers", "special_ids")
    }
    return facts
