"""The target's cache during one call: which of its layers can be rolled back, and how they are swapped in and out.

Owns: the choice of a stand-in for every layer object of a transformers cache, the refusal of what has none, and the
order enter, begin_block, commit, exit.

Does not know: how a layer kind rolls back (a file each), the decoding loop, the draft.
"""

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedOptionError, UnsupportedTargetError
from .attention import FullAttentionLayer
from .block_layer import BlockLayer
from .sliding import SlidingAttentionLayer

#: Stand-ins by the exact class of the layer they replace: a subclass may store what its base does not.
STAND_INS: dict[type, type[BlockLayer]] = {
    DynamicLayer: FullAttentionLayer,
    DynamicSlidingWindowLayer: SlidingAttentionLayer,
}

#: Layers that hold nothing (transformers 5.24 has a class for them), so there is nothing to roll back.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


class TargetCache:
    """A transformers `DynamicCache`, made so that a prefix of each verified block can be committed.

    As a context manager it swaps the layer objects of `cache`, in place, for stand-ins that write in place and roll
    back, and on the way out puts the caller's own layer objects back, holding the committed state: plain `generate`
    continues on them. An exception leaves the state of the last `begin_block` or `commit`, never half a block.

    Args:
        cache: empty, or filled by earlier turns. `DynamicCache()` without a config is filled up with full attention
            layers.
        model: the target.
        max_length: the most tokens that the call can commit, those already in `cache` included. Memory grows towards
            it.
        block_size: the most tokens that one verify forward reads.

    Raises:
        UnsupportedOptionError: the cache is static, quantised or offloaded.
        UnsupportedTargetError: a layer is of a kind that cannot be rolled back, or layers are missing.
    """

    def __init__(self, cache: Cache, model: PreTrainedModel, *, max_length: int, block_size: int):
        _refuse_other_caches(cache)
        self.cache = cache
        self._model = model
        self._sizes = {"max_length": max_length, "block_size": block_size}
        self._originals = _all_layers(cache, model)
        self._block_open = False

    def __enter__(self) -> "TargetCache":
        self._callers_list = self.cache.layers
        self._layers = [_stand_in(index, layer, self._sizes) for index, layer in enumerate(self._originals)]
        self._block_layers = [layer for layer in self._layers if isinstance(layer, BlockLayer)]
        self.cache.layers = self._layers
        return self

    def __exit__(self, exc_type, exc_value, traceback) -> None:
        if exc_type is not None or self._block_open:
            for layer in self._block_layers:
                layer.roll_back()
        layers = [layer.release() if isinstance(layer, BlockLayer) else layer for layer in self._layers]
        if self.cache.layer_class_to_replicate is not None:
            layers = _without_unused_end(layers)
        self._callers_list[:] = layers
        self.cache.layers = self._callers_list

    def get_seq_length(self) -> int:
        """Tokens read so far, those of an open block included."""
        return self.cache.get_seq_length()

    def begin_block(self) -> None:
        """What has been read so far is committed. Call before each verify forward."""
        self._block_open = True
        for layer in self._block_layers:
            layer.begin_block()

    def commit(self, kept: torch.Tensor, verified: int) -> None:
        """Make every layer as if only the first `kept[row]` of the last `verified` tokens had been read.

        Args:
            kept: `(batch,)` integers, `1 <= kept <= verified`.
            verified: tokens that the forward since `begin_block` read.
        """
        rows = kept.tolist()
        if not all(1 <= row <= verified for row in rows):
            raise UnsupportedOptionError(f"kept must lie in 1..{verified} (the verified tokens), got {rows}")
        for layer in self._block_layers:
            layer.commit(rows, verified)
        self._block_open = False


def _refuse_other_caches(cache: Cache) -> None:
    """Only a resident `DynamicCache` can be continued; any other kind is named."""
    if isinstance(cache, StaticCache):
        kind = "a static cache (cache_implementation='static')"
    elif isinstance(cache, QuantizedCache):
        kind = "a quantised cache (cache_implementation='quantized')"
    elif getattr(cache, "offloading", False):
        kind = "an offloaded cache (cache_implementation='offloaded')"
    elif not isinstance(cache, DynamicCache):
        kind = f"a {type(cache).__name__}"
    else:
        return
    raise UnsupportedOptionError(
        f"A DFlash draft needs a DynamicCache on the target, found {kind}. Leave cache_implementation unset, or hand "
        "in a DynamicCache(config=model.config)."
    )


def _all_layers(cache: DynamicCache, model: PreTrainedModel) -> list:
    """The layer objects of `cache`; one that creates its layers lazily is filled up to what the target reads."""
    expected = DynamicCache(config=model.config).layers
    layers = list(cache.layers)
    if cache.layer_class_to_replicate is not None:
        layers += [cache.layer_class_to_replicate() for _ in range(len(expected) - len(layers))]
    if len(layers) != len(expected):
        raise UnsupportedTargetError(
            f"The cache has {len(layers)} layers, but {type(model).__name__} needs {len(expected)}. Use the cache of "
            "an earlier turn on the same model, or DynamicCache(config=model.config)."
        )
    return layers


def _stand_in(index: int, layer, sizes: dict[str, int]):
    """The stand-in of one layer object; an empty layer stays itself."""
    if type(layer) in EMPTY_LAYERS:
        return layer
    if type(layer) not in STAND_INS:
        raise UnsupportedTargetError(
            f"Layer {index} of the target's cache is a {type(layer).__name__}, which hf_dflash cannot roll back "
            f"exactly. Supported: {', '.join(sorted(kind.__name__ for kind in STAND_INS))}."
        )
    return STAND_INS[type(layer)](layer, **sizes)


def _without_unused_end(layers: list) -> list:
    """Layers that a lazily filled cache would have: none behind the last one that was written."""
    used = [index for index, layer in enumerate(layers) if layer.is_initialized]
    return layers[: used[-1] + 1] if used else []
