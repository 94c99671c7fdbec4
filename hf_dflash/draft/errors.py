"""The errors that hf_dflash raises on purpose.

Owns: one class per kind of mistake a user can make or meet. Each is a `DFlashError` and also the built-in error that a
caller would expect (`ValueError` or `TypeError`), so `except ValueError` keeps working around `generate`.

Does not know: who raises them. A message always says what was found, what was expected and what to do; it is written
where the mistake is detected. This file travels to the Hub beside the configuration and the network, so it imports
nothing.
"""


class DFlashError(Exception):
    """Base class of every error that hf_dflash raises on purpose."""


class CheckpointError(DFlashError, ValueError):
    """A draft checkpoint is unreadable, incomplete, inconsistent or of a kind that is not supported."""


class PairingError(DFlashError, ValueError):
    """A draft and a target do not belong together (hidden size, vocabulary, depth, mask token)."""


class UnsupportedTargetError(DFlashError, ValueError):
    """A target has a part that cannot be tapped, verified or rolled back exactly."""


class UnsupportedOptionError(DFlashError, ValueError):
    """An option of `generate` cannot be honored together with a DFlash draft."""


class DraftDtypeError(DFlashError, TypeError):
    """A draft was asked to run in a dtype in which it does not work (float16)."""


class MissingPackageError(DFlashError, ValueError):
    """An optional package is needed for what was asked and is not installed, or is too old."""


class PromptError(DFlashError, ValueError):
    """A file of prompts cannot be read, or a row in it is not a prompt."""


class TrainingError(DFlashError, ValueError):
    """Training data or a training setup cannot give a usable draft."""
