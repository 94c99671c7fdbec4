"""hf_dflash: DFlash speculative decoding for transformers.

Owns: the public names, the registration with AutoConfig and AutoModel, and the one call that lets
`target.generate(**inputs, assistant_model=draft)` reach the DFlash loop. Importing it needs torch and transformers.

Does not know: how any of it works.
"""

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
from hf_dflash.version import __version__

__all__ = [
    "CheckpointError",
    "DFlashError",
    "DraftDtypeError",
    "MissingPackageError",
    "PairingError",
    "TrainingError",
    "UnsupportedOptionError",
    "UnsupportedTargetError",
    "__version__",
]
