"""A growing tensor that is written in place and read as a view.

It is the storage of every attention layer in the target's cache and in the draft's context.
"""

import torch

#: Minimum entries of the first allocation, so that a short chat never reallocates.
FIRST_CAPACITY = 256


class GrowingBuffer:
    """Entries along dimension -2 of a preallocated tensor `(..., capacity, D)`.

    Appending only copies the new entries. A reallocation doubles the capacity, so its amortized cost per entry is
    constant. Nothing is allocated before the first `append`, which also sets the leading dimensions, dtype and device.

    Args:
        ceiling: maximum number of entries expected at any time. Capacity doubles up to this. Exceeding it still works,
            at the cost of a reallocation.
    """

    def __init__(self, ceiling: int):
        self._ceiling = ceiling
        self._storage: torch.Tensor | None = None
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        """Return the number of readable entries."""
        return self._end - self._start

    def append(self, new: torch.Tensor, keep: int | None = None) -> None:
        """Write `new` `(..., n, D)` after the last entry.

        Args:
            keep: how many earlier entries must stay readable if older ones have to make room; None keeps all.
        """
        count = new.shape[-2]
        if not self._fits(new) or self._end + count > self._storage.shape[-2]:
            self._make_room(new, len(self) if keep is None else min(keep, len(self)))
        self._storage.narrow(-2, self._end, count).copy_(new)
        self._end += count

    def last(self, count: int) -> torch.Tensor:
        """Return a view of the last `count` entries `(..., count, D)`, or of all if there are fewer."""
        count = min(count, len(self))
        return self._storage.narrow(-2, self._end - count, count)

    def drop_last(self, count: int) -> None:
        """Drop the last `count` entries; the next `append` overwrites them."""
        self._end -= count

    def num_bytes(self) -> int:
        """Return the size of the storage in bytes."""
        return 0 if self._storage is None else self._storage.numel() * self._storage.element_size()

    def _fits(self, new: torch.Tensor) -> bool:
        """Whether `new` can be written to the storage as it is; if not, the entries move to new storage.

        Outside `torch.inference_mode`, tensors allocated within it are read-only. And between two turns the model may
        have been cast or moved (`draft.to(...)`): then the earlier entries are cast and moved as well.
        """
        storage = self._storage
        if storage is None or (storage.is_inference() and not torch.is_inference_mode_enabled()):
            return False
        return storage.dtype == new.dtype and storage.device == new.device

    def _make_room(self, new: torch.Tensor, kept: int) -> None:
        """Move the last `kept` entries to the front, of this or a larger storage, so that `new` fits after them."""
        needed = kept + new.shape[-2]
        capacity = 0 if self._storage is None else self._storage.shape[-2]
        first_kept = self._end - kept
        # Moving in place is safe only if source and destination do not overlap: 6 kept of 16 move from 10..15 to 0..5,
        # but 10 kept of 16 would move from 6..15 to 0..9.
        if needed <= capacity and first_kept >= kept and self._fits(new):
            storage = self._storage
        else:
            capacity = max(needed, min(self._ceiling, max(2 * needed, FIRST_CAPACITY)))
            storage = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
        if kept:
            storage.narrow(-2, 0, kept).copy_(self._storage.narrow(-2, first_kept, kept))
        self._storage, self._start, self._end = storage, 0, kept
