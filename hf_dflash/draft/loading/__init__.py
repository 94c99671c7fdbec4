"""Loads a draft in any published layout, through `load_draft` or `DFlashDraftModel.from_pretrained`.

`checkpoint` finds and checks the files, `adopting` wraps drafts that other code has loaded, `pairing` checks a draft
against a target.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from hf_dflash.draft.configuration_dflash import format_value
from hf_dflash.draft.errors import CheckpointError, DraftDtypeError
from hf_dflash.draft.loading.adopting import adopt_draft, is_draft
from hf_dflash.draft.loading.checkpoint import (
    HUB_OPTIONS,
    STORED_DTYPES,
    Checkpoint,
    has_full_head,
    is_draft_checkpoint,
    read_checkpoint,
)
from hf_dflash.draft.loading.pairing import TargetFacts, check_pairing, pairing_problems, pairing_warnings
from hf_dflash.draft.modeling_dflash import FP16_REASON, DFlashDraftModel, DFlashPreTrainedModel


def load_draft(
    name_or_path: str | Path,
    *,
    device_map: Any = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    attn_implementation: str | None = None,
    block_size: int | None = None,
    **options: Any,
) -> DFlashDraftModel:
    """Load a DFlash draft from a folder or the Hub, in any published layout.

    Weights are memory-mapped, checked and moved to their device one by one, so they are never in memory twice.

    Args:
        name_or_path: a folder, or the id of a Hub repository.
        device_map: as for any transformers model. Default: the CPU.
        dtype: bfloat16 or float32. Default: the checkpoint's, or bfloat16 if it has none.
        revision, token: for the Hub.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...; default: transformers' choice.
        block_size: a smaller block than the checkpoint's, at least 2.
        options: further options for the Hub (`cache_dir`, `local_files_only`, `force_download`, `subfolder`) and for
            `PreTrainedModel.from_pretrained` (`max_memory`, `quantization_config`, ...).

    Returns:
        The draft in evaluation mode; a `DFlash2DraftModel` if the checkpoint is DFlash 2. With
        `output_loading_info=True`, a pair of the draft and the loading info, as in transformers.

    Raises:
        CheckpointError: the checkpoint is incomplete, inconsistent or not supported, or weights are NaN or infinite;
            all problems are listed.
        DraftDtypeError: float16 was requested, or the checkpoint is stored in it and no dtype was requested.
    """
    options |= {"revision": revision, "token": token}
    hub_options = {key: options.pop(key) for key in HUB_OPTIONS if key in options}
    checkpoint = read_checkpoint(name_or_path, **hub_options)
    if not checkpoint.tensors and not checkpoint.problems:
        checkpoint.problems.append(checkpoint.no_weights)
    config = checkpoint.config()
    if block_size is not None:
        config.block_size = config.checked_block_size(block_size)
    for text in checkpoint.reading.warnings:
        warnings.warn(f"{checkpoint.name}: {text}", stacklevel=2)

    dtype = resolve_dtype(checkpoint, dtype)
    state = checkpoint.state_dict(dtype)
    if has_full_head(config):
        state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    if "d2t" in state:
        _check_mapping(state["d2t"], config.vocab_size)
    # None means not given.
    options |= {"device_map": device_map, "attn_implementation": attn_implementation}
    given = {key: value for key, value in options.items() if value is not None}
    if "quantization_config" in given:
        warnings.warn(
            f"{checkpoint.name} is loaded quantized, as requested. A quantized draft has lower acceptance, with 4 bits "
            "and sliding layers often none at all: watch the acceptance length.",
            stacklevel=2,
        )
    loaded = DFlashDraftModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **given)
    draft = loaded[0] if isinstance(loaded, tuple) else loaded
    draft.name_or_path = draft.config.name_or_path = checkpoint.name
    return loaded


def resolve_dtype(checkpoint: Checkpoint, requested: torch.dtype | str | None = None) -> torch.dtype:
    """Return the dtype to run in: the requested one, else the configuration's, else the stored weights', else bfloat16.

    Raises:
        DraftDtypeError: it is float16 or another dtype that a draft cannot run in, or none was requested and weights
            are stored in float16.
    """
    if requested not in (None, "auto"):
        dtype, source = requested, "was requested"
    else:
        keys = ("dtype", "torch_dtype")
        configured = next((checkpoint.raw[key] for key in keys if checkpoint.raw.get(key) is not None), None)
        stored = {STORED_DTYPES.get(checkpoint.tensors[name].dtype) for name in checkpoint.used_tensors()} - {None}
        dtype = (next(iter(stored)) if len(stored) == 1 else torch.bfloat16) if configured is None else configured
        source = "is the checkpoint's dtype"
        if torch.float16 in stored:
            dtype, source = torch.float16, "is the checkpoint's dtype (some or all weights are stored in it)"
    if isinstance(dtype, str) and isinstance(named := getattr(torch, dtype.removeprefix("torch."), None), torch.dtype):
        dtype = named
    if dtype == torch.float16:
        raise DraftDtypeError(f"float16 {source}. {FP16_REASON}")
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        found = dtype if isinstance(dtype, torch.dtype) else format_value(dtype)
        raise DraftDtypeError(f"{found} {source}, but a draft runs in bfloat16 or float32. Pass dtype=torch.bfloat16.")
    return dtype


def _check_mapping(d2t: torch.Tensor, vocab_size: int | None) -> None:
    """Check the offsets of `d2t` against the target's vocabulary: draft id i is target id i + d2t[i]."""
    ids = torch.arange(len(d2t)) + d2t
    outside = int((ids < 0).sum() + (ids >= (vocab_size or torch.iinfo(torch.long).max)).sum())
    repeated = len(ids) - len(ids.unique())
    if outside or repeated:
        raise CheckpointError(
            f"`d2t` maps {outside} draft tokens outside the target's vocabulary of {vocab_size} and {repeated} onto "
            "ids already taken. It must hold offsets: draft id i is target id i + d2t[i]."
        )


def _load_published(name_or_path: str | Path, *args: Any, **options: Any) -> DFlashDraftModel:
    """Implement `DFlashDraftModel.from_pretrained(name)` within this package: the same as `load_draft`."""
    legacy = options.pop("torch_dtype", None)
    if options.get("dtype") is None:
        options["dtype"] = legacy
    return load_draft(name_or_path, *args, **options)


DFlashPreTrainedModel.load_published = staticmethod(_load_published)

__all__ = [
    "Checkpoint",
    "TargetFacts",
    "adopt_draft",
    "check_pairing",
    "is_draft",
    "is_draft_checkpoint",
    "load_draft",
    "pairing_problems",
    "pairing_warnings",
    "read_checkpoint",
    "resolve_dtype",
]
