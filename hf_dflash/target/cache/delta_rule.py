"""Replay of gated delta rule layers (Qwen3-Next, Qwen3.5, OLMo-Hybrid) and of Kimi's, whose decay is per channel: the
state after several tokens in closed form.

The rule, for one head with state S (key dim x value dim): a token decays S by `exp(g)`, then replaces a fraction `beta`
of what S holds under its key k by its value v:  S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T.
"""

import torch
from torch import nn
from torch.nn import functional as F

from hf_dflash.target.cache.convolution import StackedConvolution
from hf_dflash.target.cache.replay import BlockRecord, Replay, accepted_mask, decay_factor

#: What transformers' delta rule functions add to a key's squared norm.
NORM_EPSILON = 1e-6


def advance_delta_states(
    states: list[torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    destinations: list[torch.Tensor],
) -> None:
    """Compute the states of several layers after `n` tokens, all tokens at once.

    With G_i the decay from the start to token i and u_i what token i writes, the rule unrolls to
    S_n = G_n S_0 + sum_j (G_n / G_j) k_j u_j^T and (I + L) u = beta (v - G k^T S_0), where
    L_ij = beta_i (G_i / G_j) <k_i, k_j> for j < i: one triangular system of `n` rows.

    Args:
        states: per layer `(batch, heads, key_dim, value_dim)` fp32.
        keys: `(layers, batch, heads, n, key_dim)` fp32, unit norm.
        values: `(layers, batch, heads, n, value_dim)` fp32.
        log_decay: `(layers, batch, heads, n, 1)` or, per channel, `(..., n, key_dim)`; at most 0.
        beta: `(layers, batch, heads, n, 1)`. A token with `log_decay` 0 and `beta` 0 leaves the state unchanged.
        destinations: per layer a contiguous tensor, other than its state, to write the new state to.
    """
    total = log_decay.cumsum(-2)
    couplings = (beta * _decayed_overlap(keys, total)).tril(-1)
    weights = torch.diag_embed(beta.squeeze(-1))
    solution = torch.linalg.solve_triangular(couplings, weights, upper=False, unitriangular=True)
    last = total[..., -1:, :]
    growth = decay_factor(last).transpose(-1, -2)
    reading = (keys * decay_factor(total)).flatten(1, 2)
    writing = (keys * decay_factor(last - total)).transpose(-1, -2).flatten(1, 2)
    # The states are megabytes each, so the rest runs layer by layer and allocates nothing of their size.
    errors = [
        torch.baddbmm(value, read, state.flatten(0, 1), alpha=-1)
        for state, read, value in zip(states, reading, values.flatten(1, 2), strict=True)
    ]
    written = solution.flatten(1, 2) @ torch.stack(errors)
    for state, destination, decay, write, values_written in zip(
        states, destinations, growth, writing, written, strict=True
    ):
        torch.mul(state, decay, out=destination)
        destination.view(-1, *destination.shape[2:]).baddbmm_(write, values_written)


def _decayed_overlap(keys: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return <k_i, k_j> times the decay from token j to token i, `(..., n, n)`; only meaningful for j <= i."""
    if total.shape[-1] == 1:
        return (keys @ keys.transpose(-1, -2)) * decay_factor(total - total.transpose(-1, -2))
    between = decay_factor(total.unsqueeze(-2) - total.unsqueeze(-3))
    return (between * keys.unsqueeze(-2) * keys.unsqueeze(-3)).sum(-1)


class DeltaReplay(Replay):
    """Replay of gated delta nets whose decay and strength (beta) are small projections of the layer's input."""

    def __init__(self, mixers: list[nn.Module]):
        super().__init__(mixers)
        first = mixers[0]
        # Queries are the first channels; the state does not depend on them.
        self._convolve = StackedConvolution([mixer.conv1d for mixer in mixers], first.activation, first.key_dim)
        self._rate = torch.stack([-mixer.A_log.float().exp() for mixer in mixers])[:, None, None]
        self._bias = torch.stack([mixer.dt_bias for mixer in mixers])[:, None, None]
        self._largest_beta = 2.0 if getattr(first, "allow_neg_eigval", False) else 1.0

    @classmethod
    def supports(cls, mixer: nn.Module) -> bool:
        needed = ("conv1d", "activation", "key_dim", "value_dim", "num_v_heads", "head_k_dim", "A_log", "dt_bias")
        return all(hasattr(mixer, name) for name in needed) and bool(cls.sources(mixer))

    @staticmethod
    def sources(mixer: nn.Module) -> list[nn.Module]:
        """Return the modules that project strength and decay: two (strength first), one for both, none if unknown."""
        for names in (("in_proj_b", "in_proj_a"), ("b_proj", "a_proj"), ("in_proj_ba",)):
            if all(hasattr(mixer, name) for name in names):
                return [getattr(mixer, name) for name in names]
        return []

    def advance(self, records: list[BlockRecord], kept: list[int], overwrite: bool) -> list[torch.Tensor]:
        first, count = self.mixers[0], max(kept)
        mixed = self._convolve([record.inputs for record in records], count)
        keys, values = mixed.split([first.key_dim, first.value_dim], dim=-1)
        strength, decay = self._strength_and_decay(records, count)
        log_decay = self._rate * F.softplus(decay.float() + self._bias)
        beta = strength.sigmoid().float() * self._largest_beta
        keys, values = _heads(keys, first.head_k_dim), _heads(values, first.value_dim // first.num_v_heads)
        return _advance(records, keys, values, log_decay.mT.unsqueeze(-1), beta.mT.unsqueeze(-1), kept, overwrite)

    def _strength_and_decay(self, records: list[BlockRecord], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as `(layers, batch, count, heads)`. A joint projection has, per key head, all strengths first."""
        stacked = [torch.stack(outputs)[:, :, :count] for outputs in zip(*(r.outputs for r in records), strict=True)]
        if len(stacked) == 2:
            return stacked[0], stacked[1]
        groups = self.mixers[0].num_k_heads
        grouped = stacked[0].unflatten(-1, (groups, 2 * self.mixers[0].num_v_heads // groups))
        strength, decay = grouped.chunk(2, dim=-1)
        return strength.flatten(-2), decay.flatten(-2)


class ChannelDeltaReplay(Replay):
    """Replay of Kimi's delta attention: a submodule of the mixer computes the decay of every channel."""

    def __init__(self, mixers: list[nn.Module]):
        super().__init__(mixers)
        first = mixers[0]
        self._convolve = StackedConvolution([mixer.conv1d for mixer in mixers], first.activation, first.qkv_dim)

    @classmethod
    def supports(cls, mixer: nn.Module) -> bool:
        needed = ("conv1d", "activation", "qkv_dim", "head_dim", "forget_gate", "b_proj")
        return all(hasattr(mixer, name) for name in needed)

    @staticmethod
    def sources(mixer: nn.Module) -> list[nn.Module]:
        return [mixer.forget_gate, mixer.b_proj]

    def advance(self, records: list[BlockRecord], kept: list[int], overwrite: bool) -> list[torch.Tensor]:
        first, count = self.mixers[0], max(kept)
        keys, values = self._convolve([record.inputs for record in records], count).chunk(2, dim=-1)
        log_decay = torch.stack([record.outputs[0] for record in records])[:, :, :count].transpose(2, 3)
        beta = torch.stack([record.outputs[1] for record in records])[:, :, :count].sigmoid().float()
        keys, values = _heads(keys, first.head_dim), _heads(values, first.head_dim)
        return _advance(records, keys, values, log_decay.float(), beta.mT.unsqueeze(-1), kept, overwrite)


def _advance(records: list[BlockRecord], keys, values, log_decay, beta, kept: list[int], overwrite: bool):
    """Run `advance_delta_states` on raw keys and values, each row by its own number of tokens.

    Keys are normalized, and repeated if several value heads share one.
    """
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + NORM_EPSILON)
    if values.shape[2] != keys.shape[2]:
        keys = keys.repeat_interleave(values.shape[2] // keys.shape[2], dim=2)
    accepted = accepted_mask(kept, keys.shape[3], like=keys)
    if accepted is not None:
        # A rejected token neither decays the state nor writes to it.
        accepted = accepted[:, None, :, None]
        log_decay, beta = log_decay * accepted, beta * accepted
    destinations = [record.destination(overwrite) for record in records]
    advance_delta_states([record.start() for record in records], keys, values, log_decay, beta, destinations)
    return destinations


def _heads(mixed: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshape `(batch, tokens, layers, heads * dim)` to `(layers, batch, heads, tokens, dim)`."""
    return mixed.unflatten(-1, (-1, dim)).permute(2, 0, 3, 1, 4)
