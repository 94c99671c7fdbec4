"""Moving recurrent states on by the accepted tokens, from what the verify forward already computed.

Owns: the interface of a replay, what it is given, and the hooks that record it.

Does not know: any recurrence; when a prefix is committed.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from hf_dflash.target.cache.convolution import ConvolutionInputs


@dataclass(frozen=True)
class BlockRecord:
    """What one layer's forward left of a block.

    Attributes:
        before: the recurrent state before the block; None means zeros.
        after: the state behind the whole block.
        inputs: what the convolution read.
        outputs: what the modules that the replay names returned, `(batch, tokens, ...)` each.
    """

    before: torch.Tensor | None
    after: torch.Tensor
    inputs: ConvolutionInputs
    outputs: list[torch.Tensor]

    def start(self) -> torch.Tensor:
        """The state before the block, in fp32."""
        return torch.zeros_like(self.after, dtype=torch.float32) if self.before is None else self.before.float()

    def destination(self, overwrite: bool) -> torch.Tensor:
        """Where the new state is to be written, in fp32: over the state behind the block, or apart.

        Fresh memory costs more than the arithmetic: a state is megabytes, and the system clears each page of it.
        """
        if overwrite and self.after.is_contiguous() and self.after.dtype == torch.float32:
            return self.after
        return torch.empty(self.after.shape, dtype=torch.float32, device=self.after.device)


class Replay(ABC):
    """How one kind of recurrent layer moves its state on, for several layers of the same shape at once.

    Args:
        mixers: the modules that hold the layers' weights.
    """

    def __init__(self, mixers: list[nn.Module]):
        self.mixers = mixers

    @classmethod
    @abstractmethod
    def understands(cls, mixer: nn.Module) -> bool:
        """Whether the mixer has the attributes that the replay reads."""

    @staticmethod
    @abstractmethod
    def sources(mixer: nn.Module) -> list[nn.Module]:
        """Submodules of a mixer whose outputs the replay needs; each runs once per forward."""

    @abstractmethod
    def advance(self, records: list[BlockRecord], kept: list[int], overwrite: bool) -> list[torch.Tensor]:
        """Per layer the state after the first `kept[row]` tokens of a block.

        Args:
            overwrite: whether the states behind the block may be overwritten by the result.
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


def decay_factor(log_decay: torch.Tensor) -> torch.Tensor:
    """`exp` of a decay between two tokens, the later minus the earlier; entries above 0 (the wrong order) are not used.

    e^-60 and e^-100 both forget all that fp32 can tell, but the second makes denormal numbers, which are slow.
    """
    return log_decay.clamp(-60.0, 0.0).exp()


def accepted_steps(kept: list[int], count: int, like: torch.Tensor) -> torch.Tensor | None:
    """`(batch, count)` of 1 for accepted tokens and 0 for rejected ones; None when all rows keep all `count`."""
    if min(kept) == count:
        return None
    return (torch.arange(count) < torch.tensor(kept)[:, None]).to(like)
