"""Short causal convolutions in front of recurrent layers, and alone (LFM2): their state is their last inputs.

Owns: the window of inputs that a committed prefix leaves behind, and the convolution of a few recorded inputs.

Does not know: where the inputs come from, what is done with the outputs.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN


@dataclass(frozen=True)
class ConvolutionInputs:
    """What a convolution read in one forward.

    Attributes:
        inputs: `(batch, channels, past + tokens)`, the earlier inputs that the state held and the new ones.
        tokens: how many are new.
        width: how many inputs the state holds.
    """

    inputs: torch.Tensor
    tokens: int
    width: int

    def state_after(self, kept: list[int]) -> torch.Tensor:
        """The state `(batch, channels, width)` when only the first `kept[row]` new inputs count.

        With 4 earlier inputs, 3 new ones (indices 4, 5, 6) and 2 kept, the state holds the inputs 2, 3, 4, 5.
        """
        past = self.inputs.shape[-1] - self.tokens
        ends = [past + count for count in kept]
        if len(set(ends)) == 1:
            return self.inputs[..., ends[0] - self.width : ends[0]]
        return torch.stack([row[:, end - self.width : end] for row, end in zip(self.inputs, ends, strict=True)])

    def convolve(self, convolution: nn.Conv1d, activation: str, count: int) -> torch.Tensor:
        """Outputs `(batch, count, channels)` at the first `count` new inputs, computed as the layer's forward does."""
        past = self.inputs.shape[-1] - self.tokens
        reach = convolution.kernel_size[0] - 1
        # The output at input `past` needs the inputs past - reach .. past; a missing past is zeros.
        window = self.inputs[..., max(past - reach, 0) : past + count]
        if past < reach:
            window = F.pad(window, (reach - past, 0))
        mixed = F.conv1d(
            window.to(convolution.weight.dtype), convolution.weight, convolution.bias, groups=convolution.groups
        )
        return ACT2FN[activation](mixed).to(window.dtype).transpose(1, 2)
