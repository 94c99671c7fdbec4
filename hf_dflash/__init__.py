"""hf_dflash: DFlash speculative decoding for transformers.

Owns: the public names, the registration with AutoConfig and AutoModel, and the one call that lets
`target.generate(**inputs, assistant_model=draft)` reach the DFlash loop. Importing it needs torch and transformers.

Does not know: how any of it works.
"""

from transformers import AutoConfig, AutoModel

from hf_dflash.comparison import Comparison, compare
from hf_dflash.configuration_dflash import DFlashConfig
from hf_dflash.dispatch import install
from hf_dflash.errors import (
    CheckpointError,
    DFlashError,
    DraftDtypeError,
    MissingPackageError,
    PairingError,
    TrainingError,
    UnsupportedOptionError,
    UnsupportedTargetError,
)
from hf_dflash.generation import DFlashGenerate
from hf_dflash.loading import adopt_draft, is_draft, load_draft
from hf_dflash.modeling_dflash import DFlash2DraftModel, DFlashDraftModel
from hf_dflash.outputs import DFlashOutput, DFlashStatistics
from hf_dflash.version import __version__

__all__ = [
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
    "MissingPackageError",
    "PairingError",
    "TrainingError",
    "UnsupportedOptionError",
    "UnsupportedTargetError",
    "__version__",
    "adopt_draft",
    "compare",
    "is_draft",
    "load_draft",
]

# One configuration, two networks: transformers chooses by the name in `architectures`.
AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
AutoModel.register(DFlashConfig, (DFlashDraftModel, DFlash2DraftModel), exist_ok=True)
install()
