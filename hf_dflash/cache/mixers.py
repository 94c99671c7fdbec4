"""Where a target keeps its recurrent layers, and whether they can verify a block at all.

Owns: finding, for each layer of a cache, the module that reads and writes its recurrent state; refusing mixers whose
forward over several tokens is not their forward over one token at a time.

Does not know: cache layers, replays.
"""

import inspect

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..errors import UnsupportedTargetError

#: Names that mixers give to the cache argument, in the versions of transformers that are supported.
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")

#: Tokens of the check: some to have a state, then some that are read together and one by one.
PREFIX, BLOCK = 3, 3

#: How many mixers of a class are checked.
CHECKED = 4

#: Largest difference, as a share of the output, that rounding can explain: in fp32 and in half precision.
ROUNDING, HALF_ROUNDING = 1e-3, 5e-2


def mixers_by_layer(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Recurrent mixers of the target's decoder by the cache layer they name.

    A mixer knows its `layer_idx` and holds a short convolution: true of every recurrent layer in transformers. Some
    of each class are run on a few random tokens to see that they can verify a block.

    Raises:
        UnsupportedTargetError: two mixers share a layer, or one reads several tokens in another way than one by one.
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
    for alike in by_class.values():
        # A mixer whose state fades fast hardly shows what it does with it, so not one alone.
        for mixer in alike[:: max(1, len(alike) // CHECKED)]:
            _refuse_clamped_steps(mixer)
            _refuse_unless_block_equals_steps(mixer, model)
    return mixers


def _refuse_clamped_steps(mixer: nn.Module) -> None:
    """Mamba-2 mixers clamp their step sizes where they read several tokens, and not where they read one."""
    limits = getattr(mixer, "time_step_limit", None)
    if limits is not None and (limits[0] > 0.0 or limits[1] < float("inf")):
        raise UnsupportedTargetError(
            f"{type(mixer).__name__} clamps its step sizes to {tuple(limits)} when it reads several tokens, but not "
            "when it reads one, so a verified block cannot equal plain decoding. Generate without a draft, or set "
            "time_step_min (time_step_limit) of the target's config so that nothing is clamped."
        )


@torch.no_grad()
def _refuse_unless_block_equals_steps(mixer: nn.Module, model: PreTrainedModel) -> None:
    """Some versions of some mixers forget their state, or compute something else, when they read several tokens."""
    device, dtype = _execution_device(mixer), model.dtype
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    # A generator of its own: the caller's random numbers must not move.
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, PREFIX + BLOCK, hidden_size, generator=noise).to(device, dtype)
    together = _read(mixer, model, tokens.split([PREFIX, BLOCK], dim=1))
    one_by_one = _read(mixer, model, tokens.split([PREFIX] + [1] * BLOCK, dim=1))
    rounding = ROUNDING if dtype == torch.float32 else HALF_ROUNDING
    if any((a - b).norm() > rounding * b.norm() for a, b in zip(together, one_by_one, strict=True)):
        raise UnsupportedTargetError(
            f"{type(mixer).__name__} of the installed transformers does not give the same result for several tokens "
            "read together as for the same tokens read one by one, so a verified block cannot equal plain decoding. "
            "Generate without a draft, or try another version of transformers."
        )


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
