"""Drafts that other code has loaded: z-lab's own classes, transformers' Muse assistant, a Hub copy of our network.

Recognizes a draft by its configuration and tensors, not by its class, and builds our network around the same
parameters.
"""

from typing import Any

import torch
from torch import nn

from hf_dflash.draft.configuration_dflash import DFlashConfig, join_problems
from hf_dflash.draft.errors import CheckpointError, DraftDtypeError
from hf_dflash.draft.layouts import read, recognize, unsupported_family
from hf_dflash.draft.loading.checkpoint import build_on_meta, has_full_head, shape_problems
from hf_dflash.draft.modeling_dflash import FP16_REASON, DFlashDraftModel

ADOPTED = "_hf_dflash_adopted"


def is_draft(candidate: Any) -> bool:
    """Return whether an object is a draft model: ours, or one that `adopt_draft` accepts or rejects by name."""
    if isinstance(candidate, DFlashDraftModel):
        return True
    raw = _raw_config(candidate)
    return raw is not None and (recognize(raw) is not None or unsupported_family(raw) is not None)


def adopt_draft(model: nn.Module) -> DFlashDraftModel:
    """Build our network around the parameters of a foreign draft; the two share memory.

    Args:
        model: a draft that other code has loaded, e.g. `AutoModel.from_pretrained(..., trust_remote_code=True)`. One of
            our own is returned as is.

    Raises:
        CheckpointError: it is not a DFlash draft, or its configuration and tensors do not match.
        DraftDtypeError: it is in float16.
    """
    if isinstance(model, DFlashDraftModel):
        return model
    if ADOPTED not in model.__dict__:
        # Stored on the foreign module, but not registered as a submodule: a chat's draft context is tied to one draft
        # object, so the next turn must get the same one.
        model.__dict__[ADOPTED] = _adopt(model)
    return model.__dict__[ADOPTED]


def _adopt(model: nn.Module) -> DFlashDraftModel:
    raw = _raw_config(model)
    if raw is None:
        raise CheckpointError(f"A {type(model).__name__} is not a DFlash draft: pass a loaded draft model.")
    published = model.state_dict(keep_vars=True)
    layout, reading = read(raw, {name: tuple(tensor.shape) for name, tensor in published.items()})
    state = {layout.rename(name): tensor for name, tensor in published.items()}
    state.pop(None, None)
    problems = reading.all_problems()
    if not problems:
        config = DFlashConfig(**reading.values)
        problems = shape_problems(config, {name: tuple(tensor.shape) for name, tensor in state.items()})
    if problems:
        raise CheckpointError(join_problems(f"This loaded draft ({layout.description}) cannot be used", problems))

    device = _only_device(state)
    if any(tensor.dtype == torch.float16 for tensor in state.values()):
        raise DraftDtypeError(FP16_REASON)
    draft = build_on_meta(config)
    if has_full_head(config):
        state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long, device=device))
    draft.load_state_dict(state, assign=True)
    # RoPE frequencies are not in the state dict: they follow from the configuration.
    draft.rotary_emb = type(draft.rotary_emb)(config).to(device)
    draft.config.name_or_path = getattr(model, "name_or_path", None) or ""
    return draft.train(model.training)


def _raw_config(candidate: Any) -> dict[str, Any] | None:
    """Return the configuration of a model as in its `config.json`, or None if it has none."""
    config = getattr(candidate, "config", None)
    if not isinstance(candidate, nn.Module) or not hasattr(config, "to_dict"):
        return None
    raw = config.to_dict()
    names = [name for name, _ in candidate.named_parameters()]
    if raw.get("dflash_config") and any(name.startswith("candidate_selector.") for name in names):
        # `architectures` is only set when a model is saved; the selector's tensors identify DFlash 2 as well.
        raw["architectures"] = ["DFlash2DraftModel"]
    return raw


def _only_device(state: dict[str, torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in state.values()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise CheckpointError(
            f"This loaded draft is spread over {', '.join(sorted(map(str, devices)))}, and its parameters alone "
            "do not show how inputs move between them. Load it with hf_dflash.load_draft(..., device_map=...) instead."
        )
    return devices.pop()
