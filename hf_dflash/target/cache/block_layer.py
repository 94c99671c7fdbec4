"""The interface between `TargetCache` and its rollback layers, one class per layer kind."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn
from transformers import Cache

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache.reading import Reading


@dataclass(frozen=True)
class LayerPlan:
    """What is needed to build a layer.

    Attributes:
        max_length: maximum number of tokens that the call can commit.
        block_size: maximum number of tokens in one verify forward.
        cache: the cache that the layer is part of. Forwards that receive it belong to this call.
        mixer: the module that reads and writes the layer's recurrent state; None for pure attention layers.
        reading: how that module must read a block.
    """

    max_length: int
    block_size: int
    cache: Cache
    mixer: nn.Module | None = None
    reading: Reading = Reading.TOGETHER


class BlockLayer(ABC):
    """A layer of a target's cache that can commit a prefix of the last block.

    Implementations also subclass the transformers layer class of their kind, so the model's forward works unchanged. A
    rollback layer replaces `original`, the layer object of the caller's cache, from `start` to `release`.
    """

    def start(self) -> None:  # noqa: B027 (most layers need nothing)
        """Start recording what forwards compute, if needed. `release` stops it."""

    @abstractmethod
    def begin_block(self) -> None:
        """Treat everything read so far as committed; the next forward reads a block."""

    @abstractmethod
    def commit(self, kept: list[int], verified: int) -> None:
        """Keep the first `kept[row]` of the `verified` tokens read since `begin_block` and discard the rest.

        Calling it again completes an interrupted commit (Ctrl-C) and does nothing after a complete one.
        """

    @abstractmethod
    def roll_back(self) -> None:
        """Restore the state at the last `begin_block` or `commit`."""

    @abstractmethod
    def release(self):
        """Write the state to the original layer object and return it."""


def same_for_all_rows(kept: list[int]) -> int:
    """Return the number of tokens that all rows keep, for layers whose rows share one length."""
    if len(set(kept)) != 1:
        raise UnsupportedOptionError(
            f"The rows of one cache kept different numbers of tokens ({kept}), but attention layers have one length "
            "for all rows. Decode the rows one at a time."
        )
    return kept[0]
