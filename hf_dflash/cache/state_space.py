"""State space layers with one decay per head (Mamba-2: Nemotron-H, Falcon-H1, Bamba, Zamba2, Granite 4, Mamba2).

Owns: the state after some tokens in closed form, and where a mixer keeps its step sizes, inputs and input matrices.

Does not know: cache layers, blocks, hooks.

The recurrence, for one head with state h (head dim x state size): with step d, decay rate A < 0, input x and input
matrix B a token gives  h <- exp(d A) h + d x B^T.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .convolution import ConvolutionInputs
from .replay import Replay


def advance_state_space(
    state: torch.Tensor, inputs: torch.Tensor, directions: torch.Tensor, log_decay: torch.Tensor
) -> torch.Tensor:
    """The state after `n` tokens: each input decayed by the tokens behind it, and the old state by all.

    Args:
        state: `(batch, heads, head_dim, state_size)` fp32.
        inputs: `(batch, n, heads, head_dim)`, already times the step size.
        directions: `(batch, n, groups, state_size)`; consecutive heads share a group.
        log_decay: `(batch, n, heads)`, step size times decay rate.

    Returns:
        the new state, a new tensor of the shape of `state`.
    """
    total = log_decay.cumsum(1)
    remaining = (total[:, -1:] - total).exp().unsqueeze(-1)
    grouped = (inputs * remaining).unflatten(2, (directions.shape[2], -1))
    arriving = torch.einsum("btghp,btgn->bghpn", grouped, directions).flatten(1, 2)
    return arriving.addcmul_(state, total[:, -1, :, None, None].exp())


class StateSpaceReplay(Replay):
    """Replay of a Mamba-2 mixer: step sizes from its input projection, the rest from its convolution."""

    @classmethod
    def understands(cls, mixer: nn.Module) -> bool:
        needed = (
            "conv1d",
            "activation",
            "in_proj",
            "dt_bias",
            "time_step_limit",
            "n_groups",
            "ssm_state_size",
            "head_dim",
        )
        return all(hasattr(mixer, name) for name in needed) and mixer.A_log.dim() == 1

    def sources(self) -> list[nn.Module]:
        return [self.mixer.in_proj]

    def advance(self, state, inputs: ConvolutionInputs, outputs: list[torch.Tensor], kept: list[int]) -> torch.Tensor:
        mixer, count = self.mixer, max(kept)
        mixed = inputs.convolve(mixer.conv1d, mixer.activation, count)
        directions = mixer.n_groups * mixer.ssm_state_size
        x, b, _ = mixed.split([mixer.num_heads * mixer.head_dim, directions, directions], dim=-1)
        steps = self._steps(outputs[0][:, :count], kept)
        x = x.float().unflatten(-1, (mixer.num_heads, -1)) * steps.unsqueeze(-1)
        if state is None:
            state = x.new_zeros((x.shape[0], *x.shape[2:], mixer.ssm_state_size))
        log_decay = steps * -mixer.A_log.float().exp()
        b = b.float().unflatten(-1, (mixer.n_groups, -1))
        return advance_state_space(state.float(), x, b, log_decay).to(state.dtype)

    def _steps(self, projected: torch.Tensor, kept: list[int]) -> torch.Tensor:
        """Step sizes `(batch, n, heads)` fp32; 0 for a rejected token, which then neither decays nor writes."""
        mixer = self.mixer
        steps = projected[..., -mixer.num_heads :]
        if hasattr(mixer, "mup_vector"):
            steps = steps * mixer.mup_vector[..., -mixer.num_heads :]
        steps = F.softplus(steps + mixer.dt_bias.to(steps.dtype)).clamp(*mixer.time_step_limit).float()
        if len(set(kept)) > 1:
            counts = torch.tensor(kept, device=steps.device)[:, None, None]
            steps = steps * (torch.arange(steps.shape[1], device=steps.device)[None, :, None] < counts)
        return steps
