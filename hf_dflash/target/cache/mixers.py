"""Find the recurrent mixers of a target and how each must read a block: whether its forward over several tokens equals
its forward over one token at a time.
"""

import inspect

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_dflash.draft.errors import UnsupportedTargetError
from hf_dflash.target.cache.reading import Reading

#: Mixers' names for the cache argument in the supported versions of transformers.
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")

#: Tokens of the check: a prefix to build up a state, then a block that is read together and one by one.
PREFIX, BLOCK = 3, 3

#: How many mixers of a class are checked. Together they cost about half of one token's forward.
NUM_CHECKED = 2

#: Largest relative difference that rounding can explain, in fp32 and in half precision.
ROUNDING, HALF_ROUNDING = 1e-3, 5e-2


def mixers_by_layer(model: PreTrainedModel) -> dict[int, tuple[nn.Module, Reading]]:
    """Return the recurrent mixers of the target's decoder by cache layer, and how they must read a block.

    A mixer has a `layer_idx` and a short convolution, as every recurrent layer in transformers does. Some of each class
    are run on a few random tokens to check that several tokens at once give the same as one at a time.

    Raises:
        UnsupportedTargetError: two mixers share a layer, or one takes no cache.
    """
    mixers: dict[int, nn.Module] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if index is None or not any(isinstance(child, nn.Conv1d) for child in module.children()):
            continue
        if index in mixers and mixers[index] is not module:
            raise UnsupportedTargetError(
                f"Two modules of {type(model).__name__} keep a recurrent state in layer {index} "
                f"({type(mixers[index]).__name__} and {type(module).__name__}); hf_dflash rolls back one per layer."
            )
        mixers[index] = module
    by_class: dict[type, list[nn.Module]] = {}
    for mixer in mixers.values():
        by_class.setdefault(type(mixer), []).append(mixer)
    readings = {mixer_class: _reading_of(same_class, model) for mixer_class, same_class in by_class.items()}
    return {index: (mixer, readings[type(mixer)]) for index, mixer in mixers.items()}


def _reading_of(mixers: list[nn.Module], model: PreTrainedModel) -> Reading:
    """Decide how mixers of one class must read a block to match plain decoding."""
    limits = getattr(mixers[0], "time_step_limit", None) or (0.0, float("inf"))
    clamps = limits[0] > 0.0 or limits[1] < float("inf")
    # A forward that was replaced on the object (accelerate does this) is bound to it and cannot be used by a copy.
    if clamps and "forward" not in vars(mixers[0]):
        return Reading.UNCLAMPED
    # If a mixer's state decays fast, its use of the state hardly shows, so check more than one.
    checked = mixers[:: max(1, len(mixers) // NUM_CHECKED)]
    if clamps or not all(_block_equals_steps(mixer, model) for mixer in checked):
        return Reading.ONE_BY_ONE
    return Reading.TOGETHER


@torch.no_grad()
def _block_equals_steps(mixer: nn.Module, model: PreTrainedModel) -> bool:
    """Whether random tokens give the same outputs and states together and one by one, up to rounding."""
    device, dtype = _execution_device(mixer), model.dtype
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    # A separate generator, to leave the caller's random state untouched.
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, PREFIX + BLOCK, hidden_size, generator=noise).to(device, dtype)
    together = _read(mixer, model, tokens.split([PREFIX, BLOCK], dim=1))
    one_by_one = _read(mixer, model, tokens.split([PREFIX] + [1] * BLOCK, dim=1))
    rounding = ROUNDING if dtype == torch.float32 else HALF_ROUNDING
    return all(bool((a - b).norm() <= rounding * b.norm()) for a, b in zip(together, one_by_one, strict=True))


def _execution_device(mixer: nn.Module) -> torch.device:
    """Return the device a mixer runs on: its weights', or its accelerate hook's if the weights are offloaded."""
    for module in mixer.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(mixer.parameters()).device


def _read(mixer: nn.Module, model: PreTrainedModel, pieces: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Read the given pieces with a new cache; return the outputs after the prefix and the final states."""
    accepted = inspect.signature(mixer.forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in accepted), None)
    if name is None:
        raise UnsupportedTargetError(
            f"{type(mixer).__name__} takes no cache argument that hf_dflash recognizes ({', '.join(CACHE_ARGUMENTS)})."
        )
    cache = DynamicCache(config=model.config)
    layer = cache.layers[mixer.layer_idx]
    outputs = []
    for piece in pieces:
        outputs.append(_outputs_per_token(mixer, mixer(piece, **{name: cache}), piece.shape[1]))
        for other in (other for other in cache.layers if isinstance(other, LinearAttentionCacheLayerMixin)):
            # Some mixers check the last layer instead of their own for an existing state.
            other.has_previous_state.update(layer.has_previous_state)
    states = [state for state in (*layer.conv_states.values(), *layer.recurrent_states.values()) if state is not None]
    merged = [torch.cat(parts, dim=1)[:, -BLOCK:] for parts in zip(*outputs, strict=True)]
    return [state.float() for state in (*merged, *states)]


def _outputs_per_token(mixer: nn.Module, output: object, tokens: int) -> list[torch.Tensor]:
    """Return the tensors `(batch, tokens, ...)` that a mixer returned: one, or several (queries, keys and values)."""
    parts = [part for part in (output if isinstance(output, tuple) else (output,)) if part is not None]
    if not all(isinstance(part, torch.Tensor) and part.dim() > 2 and part.shape[1] == tokens for part in parts):
        found = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
        raise UnsupportedTargetError(
            f"{type(mixer).__name__} has a recurrent state and returned {found} for {tokens} tokens. Only tensors of "
            "shape (batch, tokens, ...) can be compared with reading one token at a time. Generate without a draft."
        )
    return parts
