"""How a recurrent mixer reads the tokens of a block, where its own forward would not read them as it reads single ones.

Owns: the ways of reading, and carrying one out with hooks that belong to one cache.

Does not know: how a state is rolled back, which mixers need which way.
"""

import copy
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

#: A mixer's call: its positional and keyword arguments.
Call = tuple[tuple, dict[str, Any]]


class Reading(Enum):
    """The ways to read a block."""

    #: The mixer's own forward over all tokens.
    TOGETHER = auto()
    #: The same without the clamp on step sizes that some Mamba-2 mixers apply to several tokens and not to one.
    UNCLAMPED = auto()
    #: One token after the other: for mixers that forget their state when they read several (Mamba-1).
    ONE_BY_ONE = auto()


def num_tokens(call: Call) -> int:
    """Tokens that a mixer is called with: its first argument of three dimensions is `(batch, tokens, hidden)`."""
    for value in (*call[0], *call[1].values()):
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            return value.shape[1]
    return 0


def cut(call: Call, tokens: int, start: int, stop: int) -> Call:
    """The call with tokens `start` to `stop` alone: every tensor whose second dimension is the block's is cut."""

    def part(value):
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == tokens:
            return value[:, start:stop]
        return tuple(map(part, value)) if isinstance(value, tuple) else value

    return part(call[0]), {name: part(value) for name, value in call[1].items()}


def without_clamp(mixer: nn.Module) -> nn.Module:
    """A second face of the mixer, with the same weights and hooks, whose step sizes are not clamped."""
    face = copy.copy(mixer)
    face.time_step_limit = (0.0, float("inf"))
    return face


def read_one_by_one(mixer: nn.Module, call: Call, tokens: int, first: Any, after_each: Callable[[], None]) -> Any:
    """Read the tokens behind the first, whose output is `first`; `after_each` is called after every token."""
    after_each()
    outputs = [first]
    for position in range(1, tokens):
        args, kwargs = cut(call, tokens, position, position + 1)
        outputs.append(mixer.forward(*args, **kwargs))
        after_each()
    return torch.cat(outputs, dim=1)
