"""A tensor that grows at its end, is written in place and is read as a view.

Owns: the storage behind every attention layer of the target's cache and of the draft's context: when it is allocated,
how it grows, how old entries are let go.

Does not know: which layer uses it, what the entries are, or which of them are committed.
"""

import torch

#: Entries of the first allocation, when less would do: a short chat then never reallocates.
FIRST_CAPACITY = 256


class GrowingBuffer:
    """Entries along dimension -2 of a preallocated tensor `(..., capacity, D)`.

    Appending costs the new entries alone; a reallocation doubles the capacity, so its cost per entry is constant.
    Nothing is allocated before the first `append`, which also settles the leading dimensions, dtype and device.

    Args:
        ceiling: the most entries that are expected at any time. Capacity grows by doubling and stops there; a caller
            that exceeds it is served all the same, by a reallocation.
    """

    def __init__(self, ceiling: int):
        self._ceiling = ceiling
        self._storage: torch.Tensor | None = None
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        """Entries that can be read."""
        return self._end - self._start

    def append(self, new: torch.Tensor, keep: int | None = None) -> None:
        """Write `new` `(..., n, D)` behind the last entry.

        Args:
            keep: how many of the earlier entries must stay readable, when room has to be made; None keeps them all.
        """
        count = new.shape[-2]
        if not self._is_writable() or self._end + count > self._storage.shape[-2]:
            self._make_room(new, len(self) if keep is None else min(keep, len(self)))
        self._storage.narrow(-2, self._end, count).copy_(new)
        self._end += count

    def last(self, count: int) -> torch.Tensor:
        """A view of the last `count` entries `(..., count, D)`, or of all if there are fewer."""
        count = min(count, len(self))
        return self._storage.narrow(-2, self._end - count, count)

    def drop_last(self, count: int) -> None:
        """Forget the last `count` entries; they are overwritten by the next `append`."""
        self._end -= count

    def num_bytes(self) -> int:
        """Memory that the storage holds, in bytes."""
        return 0 if self._storage is None else self._storage.numel() * self._storage.element_size()

    def _is_writable(self) -> bool:
        """Whether there is storage that may be written here: what `torch.inference_mode` allocated may only be read
        outside of it, so a later turn without it moves the entries to storage of its own."""
        return self._storage is not None and (torch.is_inference_mode_enabled() or not self._storage.is_inference())

    def _make_room(self, new: torch.Tensor, kept: int) -> None:
        """Bring the last `kept` entries to the front, of this storage or of a larger one, so that `new` fits behind
        them."""
        needed = kept + new.shape[-2]
        capacity = 0 if self._storage is None else self._storage.shape[-2]
        first_kept = self._end - kept
        # Moving down is safe only where source and destination do not overlap: 6 kept of 16 move from 10..15 to 0..5,
        # but 10 kept of 16 would move from 6..15 to 0..9.
        if needed <= capacity and first_kept >= kept and self._is_writable():
            storage = self._storage
        else:
            capacity = max(needed, min(self._ceiling, max(2 * needed, FIRST_CAPACITY)))
            storage = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
        if kept:
            storage.narrow(-2, 0, kept).copy_(self._storage.narrow(-2, first_kept, kept))
        self._storage, self._start, self._end = storage, 0, kept
