"""Short causal convolutions, before recurrent layers or on their own (LFM2), whose state is their last inputs."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN


@dataclass(frozen=True)
class ConvolutionInputs:
    """What a convolution read in one forward.

    Attributes:
        inputs: `(batch, channels, past + tokens)`, the earlier inputs from the state and the new ones.
        tokens: number of new inputs.
        width: number of inputs that the state holds.
    """

    inputs: torch.Tensor
    tokens: int
    width: int

    def state_after(self, kept: list[int]) -> torch.Tensor:
        """Return the state `(batch, channels, width)` if only the first `kept[row]` new inputs count.

        With 4 earlier inputs, 3 new ones (indices 4, 5, 6) and 2 kept, the state holds the inputs 2, 3, 4, 5.
        """
        past = self.inputs.shape[-1] - self.tokens
        ends = [past + count for count in kept]
        if len(set(ends)) == 1:
            return self.inputs[..., ends[0] - self.width : ends[0]]
        return torch.stack([row[:, end - self.width : end] for row, end in zip(self.inputs, ends, strict=True)])

    def window(self, reach: int, count: int, first_channel: int = 0) -> torch.Tensor:
        """Return the inputs `(batch, channels, reach + count)` that the outputs at the first `count` new inputs need.

        With 4 earlier inputs, a reach of 3 and a count of 2 these are the inputs 1 to 5. A missing past is zero-padded.
        """
        past = self.inputs.shape[-1] - self.tokens
        window = self.inputs[:, first_channel:, max(past - reach, 0) : past + count]
        return window if past >= reach else F.pad(window, (reach - past, 0))


class StackedConvolution:
    """The short convolutions of several layers run as one, for a few tokens.

    Taps are multiplied and summed with channels last: convolution kernels are slow for many channels and few positions.

    Args:
        convolutions: depthwise, of the same shape and on one device.
        activation: name of the function applied to their outputs.
        first_channel: channels before this one are skipped.
    """

    def __init__(self, convolutions: list[nn.Conv1d], activation: str, first_channel: int = 0):
        self._first_channel = first_channel
        self._activation = ACT2FN[activation]
        weights = [convolution.weight[first_channel:, 0].float() for convolution in convolutions]
        self._taps = torch.cat(weights).t().contiguous()
        self._bias = None
        if convolutions[0].bias is not None:
            self._bias = torch.cat([convolution.bias[first_channel:].float() for convolution in convolutions])

    def __call__(self, inputs: list[ConvolutionInputs], count: int) -> torch.Tensor:
        """Compute the outputs at the first `count` new inputs, rounded as in the layers' own forward.

        Returns:
            `(batch, count, layers, channels)` fp32.
        """
        reach = len(self._taps) - 1
        windows = [layer.window(reach, count, self._first_channel).transpose(1, 2) for layer in inputs]
        joint = torch.cat(windows, dim=2).float()
        # The output at position i is the sum over taps j of input i + j; the newest is i + reach.
        mixed = joint[:, :count] * self._taps[0]
        for shift, tap in enumerate(self._taps[1:], start=1):
            mixed.addcmul_(joint[:, shift : shift + count], tap)
        if self._bias is not None:
            mixed += self._bias
        mixed = self._activation(mixed.to(windows[0].dtype)).float()
        return mixed.unflatten(2, (len(inputs), -1))
