"""Gated delta rule layers (Qwen3-Next, Qwen3.5, OLMo-Hybrid) and Kimi's, whose decay is per channel.

Owns: the state after some tokens in closed form, and where a mixer keeps the keys, values, decay and strength of its
writes.

Does not know: cache layers, blocks, hooks.

The rule, for one head with state S (key dim x value dim): a token decays S by `exp(g)`, then replaces a share `beta` of
what S
holds under its key k by its value v:  S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .convolution import ConvolutionInputs
from .replay import Replay

#: Added to a key's squared norm by transformers' delta rule functions.
NORM_EPSILON = 1e-6


def advance_delta_state(
    state: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The state after `n` tokens, all at once.

    With G_i the decay from the start to token i and u_i what token i writes, the rule unrolls to
    S_n = G_n S_0 + sum_j (G_n / G_j) k_j u_j^T and (I + L) u = beta (v - G k^T S_0), where
    L_ij = beta_i (G_i / G_j) <k_i, k_j> for j < i: one triangular system of `n` rows.

    Args:
        state: `(..., key_dim, value_dim)` fp32.
        keys: `(..., n, key_dim)`, of unit length.
        values: `(..., n, value_dim)`.
        log_decay: `(..., n, 1)` or, per channel, `(..., n, key_dim)`; at most 0.
        beta: `(..., n, 1)`. A token with `log_decay` 0 and `beta` 0 leaves the state as it is.

    Returns:
        the new state, a new tensor of the shape of `state`.
    """
    total = log_decay.cumsum(-2)
    overlap = _decayed_overlap(keys, total)
    recalled = (keys * total.exp()) @ state
    written = torch.linalg.solve_triangular(
        (beta * overlap).tril(-1), beta * (values - recalled), upper=False, unitriangular=True
    )
    last = total[..., -1:, :]
    arriving = (keys * (last - total).exp()).transpose(-1, -2) @ written
    return arriving.addcmul_(state, last.exp().transpose(-1, -2))


def _decayed_overlap(keys: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`(..., n, n)`: <k_i, k_j> times the decay from token j to token i; meaningful for j <= i."""
    if total.shape[-1] == 1:
        return (keys @ keys.transpose(-1, -2)) * (total - total.transpose(-1, -2)).exp()
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp(max=0).exp()
    return (between * keys.unsqueeze(-2) * keys.unsqueeze(-3)).sum(-1)


class DeltaReplay(Replay):
    """Replay of a gated delta net whose decay and strength come from small projections of the layer's input."""

    @classmethod
    def understands(cls, mixer: nn.Module) -> bool:
        needed = ("conv1d", "activation", "key_dim", "value_dim", "num_v_heads", "head_k_dim", "A_log", "dt_bias")
        return all(hasattr(mixer, name) for name in needed) and cls._gates(mixer) is not None

    def sources(self) -> list[nn.Module]:
        return self._gates(self.mixer)

    def advance(self, state, inputs: ConvolutionInputs, outputs: list[torch.Tensor], kept: list[int]) -> torch.Tensor:
        mixer, count = self.mixer, max(kept)
        mixed = inputs.convolve(mixer.conv1d, mixer.activation, count)
        _, keys, values = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        strength, decay = (part[:, :count] for part in self._strength_and_decay(outputs))
        log_decay = -mixer.A_log.float().exp() * F.softplus(decay.float() + mixer.dt_bias)
        beta = strength.sigmoid() * (2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0)
        return advance_rows(
            state,
            _heads(keys, keys.shape[-1] // mixer.head_k_dim),
            _heads(values, mixer.num_v_heads),
            log_decay.transpose(1, 2).unsqueeze(-1),
            beta.transpose(1, 2).unsqueeze(-1),
            kept,
        )

    @staticmethod
    def _gates(mixer: nn.Module) -> list[nn.Module] | None:
        """The modules that project strength and decay: apart (strength first), or one for both; None if unknown."""
        for names in (("in_proj_b", "in_proj_a"), ("b_proj", "a_proj"), ("in_proj_ba",)):
            if all(hasattr(mixer, name) for name in names):
                return [getattr(mixer, name) for name in names]
        return None

    def _strength_and_decay(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """`(batch, tokens, heads)` each. A joint projection interleaves them: per key head, first all strengths."""
        if len(outputs) == 2:
            return outputs
        groups = self.mixer.num_k_heads
        grouped = outputs[0].unflatten(-1, (groups, 2 * self.mixer.num_v_heads // groups))
        return [part.flatten(-2) for part in grouped.chunk(2, dim=-1)]


class ChannelDeltaReplay(Replay):
    """Replay of Kimi's delta attention: a module of the mixer gives the decay of every channel."""

    @classmethod
    def understands(cls, mixer: nn.Module) -> bool:
        needed = ("conv1d", "activation", "qkv_dim", "num_heads", "head_dim", "forget_gate", "b_proj")
        return all(hasattr(mixer, name) for name in needed)

    def sources(self) -> list[nn.Module]:
        return [self.mixer.forget_gate, self.mixer.b_proj]

    def advance(self, state, inputs: ConvolutionInputs, outputs: list[torch.Tensor], kept: list[int]) -> torch.Tensor:
        mixer, count = self.mixer, max(kept)
        mixed = inputs.convolve(mixer.conv1d, mixer.activation, count)
        _, keys, values = mixed.split([mixer.qkv_dim] * 3, dim=-1)
        log_decay, strength = (part[:, :count] for part in outputs)
        return advance_rows(
            state,
            _heads(keys, mixer.num_heads),
            _heads(values, mixer.num_heads),
            log_decay.transpose(1, 2),
            strength.sigmoid().transpose(1, 2).unsqueeze(-1),
            kept,
        )


def advance_rows(state, keys, values, log_decay, beta, kept: list[int]) -> torch.Tensor:
    """`advance_delta_state` in fp32 for `(batch, heads, tokens, dim)`, each row by its own number of tokens.

    Keys are brought to unit length, and repeated where several value heads share one.
    """
    keys, values, log_decay, beta = (part.float() for part in (keys, values, log_decay, beta))
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + NORM_EPSILON)
    if values.shape[1] != keys.shape[1]:
        keys = keys.repeat_interleave(values.shape[1] // keys.shape[1], dim=1)
    if len(set(kept)) > 1:
        # A rejected token neither decays the state nor writes to it.
        steps = torch.arange(keys.shape[2], device=keys.device)
        accepted = (steps < torch.tensor(kept, device=keys.device)[:, None])[:, None, :, None]
        log_decay, beta = log_decay * accepted, beta * accepted
    if state is None:
        state = keys.new_zeros((*keys.shape[:2], keys.shape[-1], values.shape[-1]))
    return advance_delta_state(state.float(), keys, values, log_decay, beta).to(state.dtype)


def _heads(mixed: torch.Tensor, heads: int) -> torch.Tensor:
    """`(batch, tokens, heads * dim)` as `(batch, heads, tokens, dim)`."""
    return mixed.unflatten(-1, (heads, -1)).transpose(1, 2)
