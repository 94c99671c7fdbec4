"""How a recurrent mixer must read a block if its own forward over several tokens differs from one token at a time."""

import copy
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

#: The positional and keyword arguments of a mixer's call.
Call = tuple[tuple, dict[str, Any]]


class Reading(Enum):
    """The ways to read a block."""

    #: The mixer's own forward over all tokens at once.
    TOGETHER = auto()
    #: The same, without the clamp on step sizes that some Mamba-2 mixers apply to several tokens but not to one.
    UNCLAMPED = auto()
    #: One token at a time: for mixers that discard their state when they read several (Mamba-1).
    ONE_BY_ONE = auto()


def num_tokens(call: Call) -> int:
    """Return the number of tokens in a mixer's call: its first 3-dimensional argument is `(batch, tokens, hidden)`."""
    for value in (*call[0], *call[1].values()):
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            return value.shape[1]
    return 0


def slice_tokens(call: Call, tokens: int, start: int, stop: int) -> Call:
    """Restrict a call to tokens `start` to `stop`: slice every tensor whose second dimension has the block's length."""

    def sliced(value):
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == tokens:
            return value[:, start:stop]
        return tuple(map(sliced, value)) if isinstance(value, tuple) else value

    return sliced(call[0]), {name: sliced(value) for name, value in call[1].items()}


def without_clamp(mixer: nn.Module) -> nn.Module:
    """Return a shallow copy of the mixer, with the same weights and hooks, that does not clamp its step sizes."""
    unclamped = copy.copy(mixer)
    unclamped.time_step_limit = (0.0, float("inf"))
    return unclamped


def read_one_by_one(mixer: nn.Module, call: Call, tokens: int, first: Any, after_each: Callable[[], None]) -> Any:
    """Read the tokens after the first, whose output is `first`, and call `after_each` after every token."""
    after_each()
    outputs = [first]
    for position in range(1, tokens):
        args, kwargs = slice_tokens(call, tokens, position, position + 1)
        outputs.append(mixer.forward(*args, **kwargs))
        after_each()
    if isinstance(first, tuple):
        return tuple(None if part[0] is None else torch.cat(part, dim=1) for part in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1)
