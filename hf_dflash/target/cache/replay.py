"""The interface of a replay, which advances recurrent states by the accepted tokens using what the verify forward
computed, and the hooks that record its inputs.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from hf_dflash.target.cache.convolution import ConvolutionInputs


@dataclass(frozen=True)
class BlockRecord:
    """What was recorded of one layer's forward over a block.

    Attributes:
        before: the recurrent state before the block; None means zeros.
        after: the state after the whole block.
        inputs: what the convolution read.
        outputs: what the modules in `Replay.sources` returned, `(batch, tokens, ...)` each.
    """

    before: torch.Tensor | None
    after: torch.Tensor
    inputs: ConvolutionInputs
    outputs: list[torch.Tensor]

    def start(self) -> torch.Tensor:
        """Return the state before the block in fp32."""
        return torch.zeros_like(self.after, dtype=torch.float32) if self.before is None else self.before.float()

    def destination(self, overwrite: bool) -> torch.Tensor:
        """Return the fp32 tensor to write the new state to: the state after the block, or a new one.

        New memory costs more than the arithmetic: a state is megabytes, and the system zeroes each page of it.
        """
        if overwrite and self.after.is_contiguous() and self.after.dtype == torch.float32:
            return self.after
        return torch.empty(self.after.shape, dtype=torch.float32, device=self.after.device)


class Replay(ABC):
    """Advances the states of one kind of recurrent layer, for several layers of the same shape at once.

    Args:
        mixers: the modules that hold the layers' weights.
    """

    def __init__(self, mixers: list[nn.Module]):
        self.mixers = mixers

    @classmethod
    @abstractmethod
    def supports(cls, mixer: nn.Module) -> bool:
        """Whether the mixer has the attributes that the replay uses."""

    @staticmethod
    @abstractmethod
    def sources(mixer: nn.Module) -> list[nn.Module]:
        """Return the submodules of a mixer whose outputs the replay needs; each runs once per forward."""

    @abstractmethod
    def advance(self, records: list[BlockRecord], kept: list[int], overwrite: bool) -> list[torch.Tensor]:
        """Return each layer's state after the first `kept[row]` tokens of a block.

        Args:
            overwrite: whether the result may overwrite the states after the block.
        """


class OutputRecorder:
    """Records the last output of some modules, per thread, since several threads may run one model at once.

    Only outputs of at most `longest` tokens are kept, so those of a prompt are freed.
    """

    def __init__(self, modules: list[nn.Module], longest: int):
        self._count = len(modules)
        self._longest = longest
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self._handles = [
            module.register_forward_hook(self._hook_for(position)) for position, module in enumerate(modules)
        ]

    def take(self) -> list[torch.Tensor] | None:
        """Return and clear this thread's outputs, in the order of the modules; None if one of them has not run."""
        thread = threading.get_ident()
        outputs = [self._outputs.pop((thread, position), None) for position in range(self._count)]
        return None if any(output is None for output in outputs) else outputs

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    def _hook_for(self, position: int):
        def keep(module, args, output):
            key = (threading.get_ident(), position)
            if output.shape[1] <= self._longest:
                self._outputs[key] = output
            else:
                self._outputs.pop(key, None)

        return keep


def decay_factor(log_decay: torch.Tensor) -> torch.Tensor:
    """Return `exp` of the log decay between two tokens, later minus earlier; entries above 0 (wrong order) are unused.

    e^-60 and e^-100 both vanish at fp32 precision, but the latter produces denormals, which are slow.
    """
    return log_decay.clamp(-60.0, 0.0).exp()


def accepted_mask(kept: list[int], count: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return `(batch, count)` with 1 for accepted and 0 for rejected tokens; None if all rows keep all `count`."""
    if min(kept) == count:
        return None
    return (torch.arange(count) < torch.tensor(kept)[:, None]).to(like)
