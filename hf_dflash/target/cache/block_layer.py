"""What every layer of a target's cache can do while blocks are being verified.

Owns: the interface between `TargetCache` and its layers, one per layer kind.

Does not know: any layer kind.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn
from transformers import Cache

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache.reading import Reading


@dataclass(frozen=True)
class LayerPlan:
    """What a layer must know to be built.

    Attributes:
        max_length: the most tokens that the call can commit.
        block_size: the most tokens that one verify forward reads.
        cache: the cache that the layer is part of; a forward that carries it is one of this call's.
        mixer: the module that reads and writes the layer's recurrent state; None for attention alone.
        reading: how that module must read a block.
    """

    max_length: int
    block_size: int
    cache: Cache
    mixer: nn.Module | None = None
    reading: Reading = Reading.TOGETHER


class BlockLayer(ABC):
    """One layer of a target's cache, of which a prefix of the last block can be committed.

    An implementation also is the transformers layer class of its kind, so the model's forward finds what it knows. It
    stands in for `original`, the layer object of the caller's cache, from `start` until `release`.
    """

    def start(self) -> None:  # noqa: B027 (most layers need nothing)
        """Begin to record what a forward computes, where that is needed. `release` ends it."""

    @abstractmethod
    def begin_block(self) -> None:
        """What has been read so far is committed; the next forward reads a block."""

    @abstractmethod
    def commit(self, kept: list[int], verified: int) -> None:
        """Keep the first `kept[row]` of the `verified` tokens read since `begin_block`; the rest never happened.

        Called again after an interruption (Ctrl-C), it finishes; called again after it has finished, it does nothing.
        """

    @abstractmethod
    def roll_back(self) -> None:
        """Return to the state at the last `begin_block` or `commit`."""

    @abstractmethod
    def release(self):
        """Write the state into the original layer object and return that."""


def same_for_all_rows(kept: list[int]) -> int:
    """The one number of tokens that all rows keep, for layers whose rows share a length."""
    if len(set(kept)) != 1:
        raise UnsupportedOptionError(
            f"The rows of one cache kept different numbers of tokens ({kept}), but attention layers hold one length "
            "for all rows. Decode the rows one after the other."
        )
    return kept[0]
