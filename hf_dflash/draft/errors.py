"""The errors that hf_dflash raises on purpose, one class per kind of mistake.

Each is a `DFlashError` and also the built-in error that a caller would expect (`ValueError` or `TypeError`), so
`except ValueError` keeps working around `generate`. Messages are written where the mistake is detected and always state
what was found, what was expected and what to do.

This file is uploaded to the Hub with the configuration and the network, so it imports nothing.
"""


class DFlashError(Exception):
    """Base class of every error that hf_dflash raises on purpose."""


class CheckpointError(DFlashError, ValueError):
    """A draft checkpoint is unreadable, incomplete, inconsistent or of an unsupported kind."""


class PairingError(DFlashError, ValueError):
    """A draft and a target do not match (hidden size, vocabulary, depth, mask token)."""


class UnsupportedTargetError(DFlashError, ValueError):
    """Part of a target cannot be tapped, verified or rolled back exactly."""


class UnsupportedOptionError(DFlashError, ValueError):
    """An option of `generate` cannot be honored with a DFlash draft."""


class DraftDtypeError(DFlashError, TypeError):
    """A draft would run in a dtype that it does not support (float16)."""


class MissingPackageError(DFlashError, ValueError):
    """A required optional package is not installed or is too old."""


class PromptError(DFlashError, ValueError):
    """A prompt file cannot be read, or one of its rows is not a prompt."""


class TrainingError(DFlashError, ValueError):
    """Training data or a training setup cannot produce a usable draft."""
