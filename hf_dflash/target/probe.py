"""A probe before the first token: whether a target reads a block of tokens as it reads them one at a time.

Verification relies on it, and nearly every decoder does. Some look ahead (CPM-Ant attends in both directions), count
tokens by calls, or accept only one (ProphetNet). The probe reads a few random tokens both ways, with the same calls and
the same cache as the decoding loop, and compares the logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from hf_dflash.draft.errors import DFlashError, UnsupportedTargetError
from hf_dflash.logs import get_logger
from hf_dflash.target.cache import CACHE_KEYWORD, TargetCache, attention_windows
from hf_dflash.target.cache.mixers import ROUNDING
from hf_dflash.target.rope import length_dependent_rope
from hf_dflash.target.target import Target

logger = get_logger(__name__)

#: Tokens of the probe: a prompt, then a block that is read at once and one by one.
PREFIX, BLOCK = 3, 3

#: Texts that are tried. One that passes is enough: rounding may tip a router to another expert in one of them, while a
#: target that reads blocks differently does so in all.
TRIES = 3

#: Relative difference of the logits that rounding may cause in half precision or quantized kernels, over all layers:
#: SmolLM2 in bfloat16 has up to 0.015. Targets that read a block differently have 0.3 and more.
HALF_ROUNDING = 0.15

#: Where the results are kept: on the list of decoder layers, which copies of the model object share.
_PASSED = "_hf_dflash_block_probes"

#: Arguments per token that a text-only prompt has too, as zeros.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@torch.no_grad()
def check_block_reading(target: Target, model_kwargs: dict[str, Any], device: torch.device, max_length: int) -> None:
    """Check that the target reads a block as it reads single tokens, once per model and way of running it.

    Args:
        target: the target. One in training mode is not checked, since dropout makes every forward different.
        model_kwargs: the arguments of a row, as prepared by core; not modified. What is not text is left out.
        device: the device of the input ids.
        max_length: the most tokens that the call can reach. Beyond the window of a sliding layer the target is checked
            as well: there some let the later tokens of a block see more than their window (Moshi).

    Raises:
        UnsupportedTargetError: the logits differ by more than rounding, or the forward over the block fails.
    """
    if target.model.training:
        return
    for distance in (0, _distance_beyond_windows(target, max_length)):
        key, passed = (*_key(target.model), distance), vars(target.layers).get(_PASSED, frozenset())
        if key not in passed:
            with _state_kept(target.model):
                _check_at(target, model_kwargs, device, distance)
            setattr(target.layers, _PASSED, passed | {key})


def _check_at(target: Target, model_kwargs: dict[str, Any], device: torch.device, distance: int) -> None:
    """Run the probe with a block `distance` tokens after its prompt; see `check_block_reading`."""
    differences = []
    for attempt in range(TRIES):
        ids = _random_ids(target, attempt, distance).to(device)
        difference = _difference(target, model_kwargs, ids)
        if difference is None or difference <= _rounding(target.model):
            return
        differences.append(difference)
    where = f" beyond its sliding window, after {distance} tokens" if distance else ""
    raise UnsupportedTargetError(
        f"{target.name} ({type(target.model).__name__}) does not read a block of {BLOCK} tokens as it reads them one "
        f"at a time{where}: the logits of the same tokens differ by {min(differences):.2g} of their size, where "
        f"rounding explains {_rounding(target.model):g}. A DFlash draft needs a causal decoder whose forward over "
        "several tokens equals single steps. Generate without a draft."
    )


def _distance_beyond_windows(target: Target, max_length: int) -> int:
    """Return how many tokens must be read before a block so that every window within the call's reach is full; 0 if
    there is none, or if the frequencies of the target's RoPE would change on the way.
    """
    windows = [window or 0 for window in attention_windows(_new_cache(target))]
    distance = max((window for window in windows if window < max_length), default=0)
    changes = length_dependent_rope(target.model).first_change
    return distance if PREFIX + distance + BLOCK <= changes else 0


def _key(model: PreTrainedModel) -> tuple[str, ...]:
    """Return what the result depends on besides the weights: the class, the dtype, the kernels."""
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    return type(model).__name__, str(model.dtype), str(attention), model.device.type, str(_rounding(model))


def _rounding(model: PreTrainedModel) -> float:
    """Return the relative difference of logits that rounding can explain."""
    is_exact = (
        model.dtype == torch.float32
        and getattr(model, "hf_quantizer", None) is None
        and torch.get_float32_matmul_precision() == "highest"
        and not (model.device.type != "meta" and torch.is_autocast_enabled(model.device.type))
    )
    return ROUNDING if is_exact else HALF_ROUNDING


def _difference(target: Target, model_kwargs: dict[str, Any], ids: torch.LongTensor) -> float | None:
    """Return the largest relative difference between the logits of the block read one by one and at once.

    Returns:
        None if the probe cannot tell: plain decoding does not run on a few tokens of text either, logits overflow
        (float16), or the loop would read these tokens one by one anyway.

    Raises:
        UnsupportedTargetError: the tokens can be read one by one but not at once.
    """
    try:
        one_by_one = _read_one_by_one(target, model_kwargs, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.debug(f"The block probe was skipped: {type(target.model).__name__} cannot read its tokens ({error!r}).")
        return None
    try:
        together = _read_together(target, model_kwargs, ids)
    except (DFlashError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedTargetError(
            f"{target.name} ({type(target.model).__name__}) cannot read a block of {BLOCK} tokens at once, only one "
            f"token at a time: its forward raised {type(error).__name__}: {error}. A DFlash draft needs a target that "
            "verifies blocks. Generate without a draft."
        ) from error
    if together is None or bool(one_by_one.isnan().any()) or bool(together.isnan().any()):
        return None
    if together.shape != one_by_one.shape:
        return float("inf")
    # A masked vocabulary has infinite logits at the same places, which do not count.
    unequal = torch.where(together == one_by_one, 0.0, together - one_by_one)
    size = one_by_one.masked_fill(one_by_one.isinf(), 0.0).norm(dim=-1).clamp(min=1e-30)
    return float((unequal.norm(dim=-1) / size).max())


def _read_one_by_one(target: Target, model_kwargs: dict[str, Any], ids: torch.LongTensor) -> torch.Tensor:
    """Read the block as plain generate does; return its logits `(BLOCK, vocabulary)`."""
    cache = _new_cache(target)
    outputs, kwargs = _prefill(target, model_kwargs, ids, cache)
    logits = []
    for end in range(ids.shape[1] - BLOCK + 1, ids.shape[1] + 1):
        kwargs = target.advance(outputs, kwargs, 1)
        outputs = target.verify(ids[:, :end], 1, kwargs)
        assert outputs is not None, "a single token is always read"
        logits.append(outputs.logits[0, -1].float())
    return torch.stack(logits)


def _read_together(target: Target, model_kwargs: dict[str, Any], ids: torch.LongTensor) -> torch.Tensor | None:
    """Read the block as the decoding loop does. None if the target would not read it into the prepared cache."""
    cache = _new_cache(target)
    outputs, kwargs = _prefill(target, model_kwargs, ids, cache)
    with TargetCache(cache, target.model, max_length=ids.shape[1], block_size=BLOCK) as target_cache:
        target_cache.begin_block()
        outputs = target.verify(ids, BLOCK, target.advance(outputs, kwargs, BLOCK))
        return None if outputs is None else outputs.logits[0].float()


def _new_cache(target: Target) -> DynamicCache:
    return DynamicCache(config=target.text_config)


def _prefill(
    target: Target, model_kwargs: dict[str, Any], ids: torch.LongTensor, cache: DynamicCache
) -> tuple[ModelOutput, dict[str, Any]]:
    """Read everything before the block: the prefix, and invented entries for the tokens between the two.

    Returns:
        the prefix's outputs, and the arguments that core would have after the last token before the block.
    """
    kwargs: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if name == "attention_mask" and value is not None:
            kwargs[name] = ids.new_ones((1, PREFIX))
        elif name == "position_ids" and value is not None:
            kwargs[name] = torch.arange(PREFIX, device=ids.device).expand(*value.shape[:-2], 1, PREFIX)
        elif name in _TOKEN_TYPES and value is not None:
            kwargs[name] = ids.new_zeros((1, PREFIX))
        elif value is None or isinstance(value, (bool, int, float, str)):
            kwargs[name] = value
    kwargs[CACHE_KEYWORD] = cache
    outputs = target.prefill(ids[:, :PREFIX], GenerationConfig(), kwargs)
    distance = ids.shape[1] - PREFIX - BLOCK
    if distance:
        _invent_entries(cache, distance)
    return outputs, target.advance(outputs, kwargs, distance)


def _invent_entries(cache: DynamicCache, count: int) -> None:
    """Append random keys and values to every attention layer, as if `count` more tokens had been read.

    In layers with a window, the entries that leave it while the block is read have large values, so that a token that
    sees one of them too many has very different logits.
    """
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        new = [
            torch.randn((*state.shape[:2], count, state.shape[-1]), generator=generator).to(state)
            for state in (layer.keys, layer.values)
        ]
        window = getattr(layer, "sliding_window", None)
        if window is not None and window <= count:
            oldest = count - (window - 1)
            new[1][..., oldest : oldest + BLOCK, :] *= min(window, 1000)
        layer.update(*new)


def _random_ids(target: Target, seed: int, distance: int = 0) -> torch.LongTensor:
    """Return `(1, PREFIX + distance + BLOCK)` random ids without the special ones of the configuration (images,
    padding). Those in the middle are never read.

    They come from a generator of their own, to leave the caller's random state untouched.
    """
    vocabulary = min(target.num_embeddings, target.text_config.vocab_size)
    drawn = torch.randint(vocabulary, (64,), generator=torch.Generator().manual_seed(seed)).tolist()
    special = set(_special_ids(target.model.config.to_dict()))
    chosen = ([token for token in drawn if token not in special] + drawn)[: PREFIX + BLOCK]
    return torch.tensor([chosen[:PREFIX] + chosen[:1] * distance + chosen[PREFIX:]])


def _special_ids(config: Any, name: str = "") -> Iterator[int]:
    """Yield the token ids that a configuration mentions, at any depth."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _special_ids(value, str(key))
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _special_ids(value, name)
    elif isinstance(config, int) and name.endswith(("token_id", "token_ids", "token_index")):
        yield config


@contextmanager
def _state_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore what forwards leave on modules: the frequencies of a dynamic RoPE, the position offset after an image."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for name, value in attributes.items():
                current = vars(module).get(name)
                if current is not value and _is_plain(value) and _is_plain(current):
                    vars(module)[name] = value
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, bool, int, float)) and not isinstance(value, nn.Parameter)
