"""Capture the target states of a text (taps and, for distillation, the last hidden state), and run the draft with them.

For distillation also: what the target does to its logits outside its head. Storing states on disk is left to
`state_cache`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.packing import PackedBlocks, attention_masks, flex_block_masks


@dataclass(frozen=True)
class TargetStates:
    """Target states of a batch of sequences.

    Attributes:
        taps: `(batch, c, taps * hidden)`, concatenated outputs of the tapped decoder layers.
        final: `(batch, c, hidden)`, the input of the target's head at each position, or None. `final[:, p]` predicts
            token p + 1.
    """

    taps: torch.Tensor
    final: torch.Tensor | None = None


class StateCapture:
    """Runs the target over whole sequences, without head and cache, and keeps the taps (and the last hidden state).

    Args:
        target: the target.
        layer_ids: target layers that the draft taps.
        with_final: whether to keep the last hidden state too.
    """

    def __init__(self, target: Target, layer_ids: list[int], with_final: bool = False):
        self._target = target
        self._layer_ids = layer_ids
        self._with_final = with_final
        self._decoder: Any = target.model.get_decoder()

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor) -> TargetStates:
        """Capture the states of `(batch, c)` sequences padded on the right.

        No mask is needed: in a causal model, states at real positions do not depend on the padding after them.
        """
        ids = input_ids.to(self._target.model.device)
        with self._target.taps(self._layer_ids) as taps, taps.recording():
            final = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            kept = taps.take(ids.device)
        return TargetStates(kept, final if self._with_final else None)


@dataclass(frozen=True)
class LogitTransform:
    """What a target does to its head's output to get its logits: `head * scale`, then `cap * tanh(. / cap)`.

    Granite divides its logits, Cohere multiplies them, Gemma caps them, all outside of the module that is its head.
    Without this, its distribution would have another temperature.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, head_output: torch.Tensor) -> torch.Tensor:
        """Map the head's output for any subset of the vocabulary, `(..., V')`, to logits."""
        logits = head_output if self.scale == 1.0 else head_output.float() * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits.float() / self.cap)


_LEVELS = 4.0 ** torch.arange(-2, 7)
"""Largest head output of each state of the measurement: 1/16 to 4096, well inside the range of float16."""


@torch.no_grad()
def measure_logit_transform(target: Target) -> LogitTransform:
    """Measure what the target does to its logits outside its head, by running its own forward on known states.

    In a forward over a few tokens, the last hidden states are replaced by random ones, from so small that a cap does
    little to so large that it is reached. The logits are then compared with the head's output for the same states.

    Raises:
        TrainingError: the logits are not the head's output, scaled and capped.
    """
    states = torch.randn(1, len(_LEVELS), target.text_config.hidden_size, generator=torch.Generator().manual_seed(0))
    states = states.to(target.model.device, target.dtype)
    bias = target.head(torch.zeros_like(states))
    spread = (target.head(states) - bias).float().abs().amax(-1, keepdim=True)
    states = (states * (_LEVELS[:, None].to(spread.device) / spread).to(states.device)).to(target.dtype)
    raw, logits = target.head(states), _logits_of_states(target, states)
    transform = None
    if logits is not None and logits.shape == raw.shape:
        transform = _fit(raw[0].double().cpu(), logits[0].double().cpu(), torch.finfo(target.dtype).eps)
    if transform is None:
        raise TrainingError(
            f"distillation is not supported for {target.name}: the logits of {type(target.model).__name__} are not the "
            "output of its head, scaled and capped, so the draft would be taught another distribution than the "
            "target's; set `distillation` to 0"
        )
    return transform


def _logits_of_states(target: Target, states: torch.Tensor) -> torch.Tensor | None:
    """Run the target's own forward with `states (1, n, hidden)` in place of its last hidden states.

    Returns:
        `(1, n, vocabulary)`, or None if the decoder's output has no last hidden states to replace.
    """
    replaced = []

    def swap(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, ModelOutput) and getattr(output, "last_hidden_state", None) is not None:
            output.last_hidden_state = states.to(output.last_hidden_state)
            replaced.append(True)

    handle = target.model.get_decoder().register_forward_hook(swap)
    try:
        ids = torch.zeros(1, states.shape[1], dtype=torch.long, device=target.model.device)
        logits = target.model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return logits if replaced else None


def _fit(raw: torch.Tensor, logits: torch.Tensor, eps: float) -> LogitTransform | None:
    """Fit the transform to head outputs and logits, both `(n, vocabulary)` in float64, in ascending order of size.

    Args:
        eps: of the dtype that the target computes them in.

    Returns:
        the transform, or None if there is none that explains every row.
    """
    size = logits.abs().amax(-1, keepdim=True)
    if not (raw.isfinite().all() and logits.isfinite().all() and (size > 0).all()):
        return None

    def slope(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x * y).sum() / (x * x).sum().clamp(min=1e-300))

    def fits(transform: LogitTransform) -> bool:
        return bool(((transform(raw) - logits).abs() <= max(4 * eps, 1e-4) * size).all())

    scale = slope(raw / size, logits / size)
    linear = LogitTransform(1.0 if abs(scale - 1) < max(eps / 8, 1e-6) else scale)
    if fits(linear):
        return linear
    scale = slope(raw[0], logits[0])
    for _ in range(10):  # each given the other, starting with the scale of the smallest states
        cap = _solve_cap(scale * raw[-1], logits[-1])
        below = logits.abs() < cap / 2
        uncapped = cap * torch.atanh(torch.where(below, logits / cap, 0.0))
        scale = slope(raw * below / size, uncapped * below / size)
    capped = LogitTransform(scale, cap)
    return capped if fits(capped) else None


def _solve_cap(scaled: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the cap that maps the largest value of `scaled (vocabulary,)` to its logit, by bisection."""
    at = int(logits.abs().argmax())
    x, y = abs(float(scaled[at])), abs(float(logits[at]))
    low, high = y, 1e6 * y
    for _ in range(100):  # cap * tanh(x / cap) grows with the cap
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(x / middle) < y else (low, middle)
    return high


@torch.no_grad()
def head_rows(target: Target, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight `(V, hidden)` and the bias `(V,)`, None if it is zero, of the target's head.

    They are found by calling the head, so that quantized heads work too.

    Args:
        hidden: states `(n, hidden)` of the dtype and on the device to return them in.
    """
    size = hidden.shape[-1]
    units = torch.eye(size, device=hidden.device, dtype=hidden.dtype)
    bias = target.head(torch.zeros_like(units[:1]))[0]
    if not bias.any():
        return target.head(units).T.contiguous().to(hidden.device), None
    # Large multiples of the unit vectors, so that the weight is not lost in the rounding of weight + bias.
    multiple = 1024.0
    outputs = target.head(units * multiple)
    weight = ((outputs.float() - bias.float()) / multiple).to(outputs.dtype)
    return weight.T.contiguous().to(hidden.device), bias.to(hidden.device)


def run_blocks(
    draft: Any, unwrapped: DFlashDraftModel, target: Target, taps: torch.Tensor, packed: PackedBlocks
) -> torch.Tensor:
    """Compute the draft's hidden states at every block position.

    Args:
        draft: the draft to call, possibly wrapped for several devices.
        unwrapped: the same draft without the wrapper.
        taps: `(batch, c, taps * hidden)`.

    Returns:
        `(batch, m, s, hidden)`.
    """
    with torch.no_grad():
        embedded = target.embed(packed.input_ids) if unwrapped.embed_tokens is None else None
    if embedded is None:
        embedded = unwrapped.embed_tokens(packed.input_ids)
    flex = unwrapped.config._attn_implementation == "flex_attention"
    masks = (flex_block_masks if flex else attention_masks)(packed, unwrapped.config)
    output = draft(
        noise_embeds=embedded,
        context_hidden_states=taps,
        attention_mask=masks,
        position_ids=packed.position_ids,
        use_cache=False,
        block_length=packed.block_size,
    )
    return output.last_hidden_state.unflatten(1, (-1, packed.block_size))
