"""hf_dflash: DFlash speculative decoding for transformers.

Importing it registers drafts with `AutoConfig` and `AutoModel`, and lets
`target.generate(**inputs, assistant_model=draft)` reach the DFlash loop. Everything public is here; what decoding does
not need is imported with its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel

from hf_dflash.decoding.comparison import Comparison, compare
from hf_dflash.decoding.dispatch import install
from hf_dflash.decoding.generate import DFlashGenerate
from hf_dflash.decoding.statistics import DFlashOutput, DFlashStatistics
from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import (
    CheckpointError,
    DFlashError,
    DraftDtypeError,
    MissingPackageError,
    PairingError,
    PromptError,
    TrainingError,
    UnsupportedOptionError,
    UnsupportedTargetError,
)
from hf_dflash.draft.loading import adopt_draft, is_draft, load_draft
from hf_dflash.draft.modeling_dflash import DFlash2DraftModel, DFlashDraftModel
from hf_dflash.target.cache import CACHE_KEYWORD
from hf_dflash.version import __version__

if TYPE_CHECKING:
    from hf_dflash.draft.hub import export_draft
    from hf_dflash.draft.inspection import Inspection, inspect_draft
    from hf_dflash.pair import Pair, encode, load_pair
    from hf_dflash.prompts import Prompt, load_prompts
    from hf_dflash.smollm2 import demo_draft, demo_target
    from hf_dflash.training import (
        Acceptance,
        RegenerationSettings,
        TrainingResult,
        TrainingSettings,
        measure_acceptance,
        read_prompts,
        regenerate,
        save_draft,
        train,
    )

#: Public name -> the module that has it, imported with the first use of the name.
_LAZY = {
    "Acceptance": "training",
    "Inspection": "draft.inspection",
    "Pair": "pair",
    "Prompt": "prompts",
    "RegenerationSettings": "training",
    "TrainingResult": "training",
    "TrainingSettings": "training",
    "demo_draft": "smollm2",
    "demo_target": "smollm2",
    "encode": "pair",
    "export_draft": "draft.hub",
    "inspect_draft": "draft.inspection",
    "load_pair": "pair",
    "load_prompts": "prompts",
    "measure_acceptance": "training",
    "read_prompts": "training",
    "regenerate": "training",
    "save_draft": "training",
    "train": "training",
}

__all__ = [
    "CACHE_KEYWORD",
    "Acceptance",
    "CheckpointError",
    "Comparison",
    "DFlash2DraftModel",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashError",
    "DFlashGenerate",
    "DFlashOutput",
    "DFlashStatistics",
    "DraftDtypeError",
    "Inspection",
    "MissingPackageError",
    "Pair",
    "PairingError",
    "Prompt",
    "PromptError",
    "RegenerationSettings",
    "TrainingError",
    "TrainingResult",
    "TrainingSettings",
    "UnsupportedOptionError",
    "UnsupportedTargetError",
    "__version__",
    "adopt_draft",
    "compare",
    "demo_draft",
    "demo_target",
    "encode",
    "export_draft",
    "inspect_draft",
    "is_draft",
    "load_draft",
    "load_pair",
    "load_prompts",
    "measure_acceptance",
    "read_prompts",
    "regenerate",
    "save_draft",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# One configuration, two networks: transformers chooses by the name in `architectures`.
AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
AutoModel.register(DFlashConfig, (DFlashDraftModel, DFlash2DraftModel), exist_ok=True)
install()
