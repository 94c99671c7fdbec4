"""Moving a recurrent state on by the accepted tokens, from what the verify forward already computed.

Owns: the interface of a replay, the hooks that record what it needs, and the generic fallback that runs the layer
again.

Does not know: any recurrence; when a prefix is committed.
"""

import threading
from abc import ABC, abstractmethod

import torch
from torch import nn

from .convolution import ConvolutionInputs


class Replay(ABC):
    """How one kind of recurrent layer moves its state on.

    Args:
        mixer: the module that holds the layer's weights.
    """

    def __init__(self, mixer: nn.Module):
        self.mixer = mixer

    @classmethod
    @abstractmethod
    def understands(cls, mixer: nn.Module) -> bool:
        """Whether the mixer has the attributes that the replay reads."""

    @abstractmethod
    def sources(self) -> list[nn.Module]:
        """Submodules of the mixer whose outputs the replay needs; each runs once per forward."""

    @abstractmethod
    def advance(
        self,
        state: torch.Tensor | None,
        inputs: ConvolutionInputs,
        outputs: list[torch.Tensor],
        kept: list[int],
    ) -> torch.Tensor:
        """The state after the first `kept[row]` tokens of a block.

        Args:
            state: the recurrent state before the block; None means zeros.
            inputs: what the mixer's convolution read in the block.
            outputs: what `sources` returned, `(batch, tokens, ...)` each.
        """


class OutputRecorder:
    """The last output of some modules, kept apart by thread: two threads may run one model at once.

    Only outputs of at most `longest` tokens are kept, so a prompt's are freed.
    """

    def __init__(self, modules: list[nn.Module], longest: int):
        self._count = len(modules)
        self._longest = longest
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self._handles = [
            module.register_forward_hook(self._keep_as(position)) for position, module in enumerate(modules)
        ]

    def take(self) -> list[torch.Tensor] | None:
        """This thread's outputs, in the order of the modules; None when one of them has not run."""
        thread = threading.get_ident()
        outputs = [self._outputs.pop((thread, position), None) for position in range(self._count)]
        return None if any(output is None for output in outputs) else outputs

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    def _keep_as(self, position: int):
        def keep(module, args, output):
            key = (threading.get_ident(), position)
            if output.shape[1] <= self._longest:
                self._outputs[key] = output
            else:
                self._outputs.pop(key, None)

        return keep


def run_again(mixer: nn.Module, args: tuple, kwargs: dict, tokens: int, count: int) -> None:
    """Call a mixer as the verify forward did, on the first `count` of its `tokens` tokens; it updates its cache itself.

    Every tensor whose second dimension is the block's is cut.
    """

    def cut(value):
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == tokens:
            return value[:, :count]
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        return value

    mixer(*cut(args), **{name: cut(value) for name, value in kwargs.items()})
