"""Where a target keeps its recurrent layers, and how each of them must read a block.

Owns: finding, for each layer of a cache, the module that reads and writes its recurrent state; telling whether its
forward over several tokens equals its forward over one token at a time.

Does not know: cache layers, replays.
"""

import inspect

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_dflash.draft.errors import UnsupportedTargetError
from hf_dflash.target.cache.reading import Reading

#: Names that mixers give to the cache argument, in the versions of transformers that are supported.
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")

#: Tokens of the check: some to have a state, then some that are read together and one by one.
PREFIX, BLOCK = 3, 3

#: How many mixers of a class are checked: together they cost about half a token's forward.
CHECKED = 2

#: Largest difference, as a share of the output, that rounding can explain: in fp32 and in half precision.
ROUNDING, HALF_ROUNDING = 1e-3, 5e-2


def mixers_by_layer(model: PreTrainedModel) -> dict[int, tuple[nn.Module, Reading]]:
    """Recurrent mixers of the target's decoder by the cache layer they name, and how they must read a block.

    A mixer knows its `layer_idx` and holds a short convolution: true of every recurrent layer in transformers. Some of
    each class are run on a few random tokens to see whether they read several tokens as they read one.

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
    readings = {mixer_class: _reading_of(alike, model) for mixer_class, alike in by_class.items()}
    return {index: (mixer, readings[type(mixer)]) for index, mixer in mixers.items()}


def _reading_of(alike: list[nn.Module], model: PreTrainedModel) -> Reading:
    """How mixers of one class must read a block so that it equals plain decoding."""
    limits = getattr(alike[0], "time_step_limit", None) or (0.0, float("inf"))
    clamps = limits[0] > 0.0 or limits[1] < float("inf")
    # A forward that was replaced on the object (accelerate does so) belongs to that object and cannot be lent to
    # another.
    if clamps and "forward" not in vars(alike[0]):
        return Reading.UNCLAMPED
    # A mixer whose state fades fast hardly shows what it does with it, so not one alone.
    some = alike[:: max(1, len(alike) // CHECKED)]
    if clamps or not all(_block_equals_steps(mixer, model) for mixer in some):
        return Reading.ONE_BY_ONE
    return Reading.TOGETHER


@torch.no_grad()
def _block_equals_steps(mixer: nn.Module, model: PreTrainedModel) -> bool:
    """Whether random tokens give the same outputs and states together and one by one, up to rounding."""
    device, dtype = _execution_device(mixer), model.dtype
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    # A generator of its own: the caller's random numbers must not move.
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, PREFIX + BLOCK, hidden_size, generator=noise).to(device, dtype)
    together = _read(mixer, model, tokens.split([PREFIX, BLOCK], dim=1))
    one_by_one = _read(mixer, model, tokens.split([PREFIX] + [1] * BLOCK, dim=1))
    rounding = ROUNDING if dtype == torch.float32 else HALF_ROUNDING
    return all(bool((a - b).norm() <= rounding * b.norm()) for a, b in zip(together, one_by_one, strict=True))


def _execution_device(mixer: nn.Module) -> torch.device:
    """Where a mixer computes: the device of its weights, or that of accelerate's hook if they are kept elsewhere."""
    for module in mixer.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(mixer.parameters()).device


def _read(mixer: nn.Module, model: PreTrainedModel, pieces: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Outputs behind the prefix, read in the given pieces with a cache of their own, and the states at the end."""
    accepted = inspect.signature(mixer.forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in accepted), None)
    if name is None:
        raise UnsupportedTargetError(
            f"{type(mixer).__name__} takes no cache argument that hf_dflash knows ({', '.join(CACHE_ARGUMENTS)})."
        )
    cache = DynamicCache(config=model.config)
    layer = cache.layers[mixer.layer_idx]
    outputs = []
    for piece in pieces:
        outputs.append(mixer(piece, **{name: cache}))
        for other in (other for other in cache.layers if isinstance(other, LinearAttentionCacheLayerMixin)):
            # Some mixers ask the last layer, and not theirs, whether there is a state.
            other.has_previous_state.update(layer.has_previous_state)
    states = [state for state in (*layer.conv_states.values(), *layer.recurrent_states.values()) if state is not None]
    return [state.float() for state in (torch.cat(outputs, dim=1)[:, -BLOCK:], *states)]
