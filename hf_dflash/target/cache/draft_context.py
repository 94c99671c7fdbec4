"""The draft's context: the keys and values of every committed token for each draft layer, in preallocated buffers."""

from collections.abc import Sequence

import torch

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache.buffer import GrowingBuffer


class DraftContextCache:
    """Keys and values of a draft, written in place and read as views.

    A forward of the draft appends the new context and the block; the caller then drops the block with `crop(-block)`.
    A layer with a sliding window holds little more than the window and may return fewer entries than were appended in
    total, so count from the end.

    Args:
        sliding_windows: each draft layer's window (which includes the token itself), or None for full attention.
        max_length: maximum number of context tokens in the call.
        block_size: maximum number of block tokens after them.
    """

    def __init__(self, sliding_windows: Sequence[int | None], *, max_length: int, block_size: int):
        self._windows = list(sliding_windows)
        full = max_length + block_size
        ceilings = [full if w is None else min(full, 2 * (w - 1 + block_size)) for w in self._windows]
        self._keys = [GrowingBuffer(ceiling) for ceiling in ceilings]
        self._values = [GrowingBuffer(ceiling) for ceiling in ceilings]
        self._lengths = [0] * len(self._windows)

    def __len__(self) -> int:
        return len(self._windows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(batch, heads, n, D)` to a layer.

        Returns:
            views of all its keys and values; for a sliding layer only the last `window - 1 + n`, as far back as the
            first new entry attends.
        """
        new, window = key_states.shape[-2], self._windows[layer_idx]
        past = self._lengths[layer_idx] if window is None else window - 1
        self._keys[layer_idx].append(key_states, past)
        self._values[layer_idx].append(value_states, past)
        self._lengths[layer_idx] += new
        return self._keys[layer_idx].last(past + new), self._values[layer_idx].last(past + new)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens appended to a layer and not dropped."""
        return self._lengths[layer_idx]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens of every layer (transformers' convention: a number <= 0)."""
        dropped = abs(tokens_to_remove)
        for layer_idx, window in enumerate(self._windows):
            held, length = len(self._keys[layer_idx]), self._lengths[layer_idx]
            needed = length - dropped if window is None else min(window - 1, length - dropped)
            if needed < 0 or held - dropped < needed:
                raise UnsupportedOptionError(
                    f"{dropped} tokens cannot be dropped from layer {layer_idx} of the draft's context: it has read "
                    f"{length} and holds the last {held} (window {window}). Rebuild the context from the prompt."
                )
        for layer_idx in range(len(self._windows)):
            self._keys[layer_idx].drop_last(dropped)
            self._values[layer_idx].drop_last(dropped)
            self._lengths[layer_idx] -= dropped

    def num_bytes(self) -> int:
        """Return the size of the buffers in bytes."""
        return sum(buffer.num_bytes() for buffer in (*self._keys, *self._values))
