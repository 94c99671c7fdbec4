"""Replay of state space layers with one decay per head (Mamba-2: Nemotron-H, Falcon-H1, Bamba, Zamba2, Granite 4,
Mamba2): the state after several tokens in closed form.

The recurrence, for one head with state h (head dim x state size), step d, decay rate A < 0, input x and input matrix B:
h <- exp(d A) h + d x B^T.
"""

import torch
from torch import nn
from torch.nn import functional as F

from hf_dflash.target.cache.convolution import StackedConvolution
from hf_dflash.target.cache.replay import BlockRecord, Replay, accepted_mask, decay_factor


def advance_state_spaces(
    states: list[torch.Tensor],
    inputs: torch.Tensor,
    directions: torch.Tensor,
    log_decay: torch.Tensor,
    destinations: list[torch.Tensor],
) -> None:
    """Compute the states of several layers after `n` tokens: inputs decay by the tokens after them, old states by all.

    Args:
        states: per layer `(batch, heads, head_dim, state_size)` fp32.
        inputs: `(layers, batch, n, heads, head_dim)` fp32, already multiplied by the step size.
        directions: `(layers, batch, n, groups, state_size)` fp32; consecutive heads share a group.
        log_decay: `(layers, batch, n, heads)`, step size times decay rate.
        destinations: per layer a contiguous tensor, other than its state, to write the new state to.
    """
    total = log_decay.cumsum(2)
    arriving = inputs * decay_factor(total[:, :, -1:] - total).unsqueeze(-1)
    arriving = arriving.permute(0, 1, 3, 4, 2).flatten(1, 2)
    heads_per_group = inputs.shape[3] // directions.shape[3]
    directions = directions.transpose(2, 3).repeat_interleave(heads_per_group, dim=2).flatten(1, 2)
    growth = decay_factor(total[:, :, -1, :, None, None])
    for state, destination, decay, x, b in zip(states, destinations, growth, arriving, directions, strict=True):
        torch.mul(state, decay, out=destination)
        destination.view(-1, *destination.shape[2:]).baddbmm_(x, b)


class StateSpaceReplay(Replay):
    """Replay of Mamba-2 mixers: step sizes come from the input projection, the rest from the convolution."""

    def __init__(self, mixers: list[nn.Module]):
        super().__init__(mixers)
        self._convolve = StackedConvolution([mixer.conv1d for mixer in mixers], mixers[0].activation)
        self._rate = torch.stack([-mixer.A_log.float().exp() for mixer in mixers])[:, None, None]
        self._bias = torch.stack([mixer.dt_bias for mixer in mixers])[:, None, None]

    @classmethod
    def supports(cls, mixer: nn.Module) -> bool:
        needed = ("conv1d", "activation", "in_proj", "dt_bias", "n_groups", "ssm_state_size", "num_heads", "head_dim")
        return all(hasattr(mixer, name) for name in needed) and mixer.A_log.dim() == 1

    @staticmethod
    def sources(mixer: nn.Module) -> list[nn.Module]:
        return [mixer.in_proj]

    def advance(self, records: list[BlockRecord], kept: list[int], overwrite: bool) -> list[torch.Tensor]:
        first, count = self.mixers[0], max(kept)
        mixed = self._convolve([record.inputs for record in records], count).permute(2, 0, 1, 3)
        directions = first.n_groups * first.ssm_state_size
        x, b, _ = mixed.split([first.num_heads * first.head_dim, directions, directions], dim=-1)
        steps = self._steps(records, count)
        accepted = accepted_mask(kept, count, like=steps)
        if accepted is not None:
            # A token with step size 0 neither decays the state nor writes to it.
            steps = steps * accepted[:, :, None]
        destinations = [record.destination(overwrite) for record in records]
        advance_state_spaces(
            [record.start() for record in records],
            x.unflatten(-1, (first.num_heads, -1)) * steps.unsqueeze(-1),
            b.unflatten(-1, (first.n_groups, -1)),
            steps * self._rate,
            destinations,
        )
        return destinations

    def _steps(self, records: list[BlockRecord], count: int) -> torch.Tensor:
        """Return the step sizes `(layers, batch, count, heads)` fp32, the last outputs of the input projection."""
        first = self.mixers[0]
        steps = torch.stack([record.outputs[0][:, :count, -first.num_heads :] for record in records])
        if hasattr(first, "mup_vector"):
            steps = steps * first.mup_vector[..., -first.num_heads :]
        return F.softplus(steps + self._bias.to(steps.dtype)).float()
