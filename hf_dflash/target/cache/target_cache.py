"""The target's cache during one call: replaces each layer with one that can be rolled back, and puts the caller's own
layers back at the end.

The order of calls is enter, begin_block, commit or roll_back, exit. Each layer kind implements its rollback in its own
module.
"""

from collections import Counter

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from hf_dflash.draft.errors import UnsupportedOptionError, UnsupportedTargetError
from hf_dflash.target.cache.attention import FullAttentionLayer
from hf_dflash.target.cache.block_layer import BlockLayer, LayerPlan
from hf_dflash.target.cache.facts import tokens_in
from hf_dflash.target.cache.hybrid import HybridLayer, HybridSlidingLayer
from hf_dflash.target.cache.mixers import mixers_by_layer
from hf_dflash.target.cache.reading import Reading
from hf_dflash.target.cache.recurrent import RecurrentLayer
from hf_dflash.target.cache.replay_group import group_layers
from hf_dflash.target.cache.sliding import SlidingAttentionLayer

#: Rollback layers by the exact class of the layer they replace: a subclass may store more than its base.
ROLLBACK_LAYERS: dict[type, type[BlockLayer]] = {
    DynamicLayer: FullAttentionLayer,
    DynamicSlidingWindowLayer: SlidingAttentionLayer,
    LinearAttentionLayer: RecurrentLayer,
    LinearAttentionAndFullAttentionLayer: HybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: HybridSlidingLayer,
}

#: Layers that hold nothing (transformers 5.24 has a class for them) and need no rollback.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


class TargetCache:
    """A transformers `DynamicCache` in which a prefix of each verified block can be committed.

    On entry, this context manager replaces the layer objects of `cache` with rollback layers, which write in place and
    can be rolled back. On exit it restores the caller's layer objects with the committed state, so that plain
    `generate` can continue from them. An exception leaves the state of the last `begin_block` or `commit`, never half a
    block. An interrupted commit is completed first.

    Args:
        cache: empty, or filled by earlier turns. `DynamicCache()` without a config is extended with full attention
            layers.
        model: the target.
        max_length: maximum number of tokens that the call can commit, including those already in `cache`. Memory grows
            as needed up to this.
        block_size: maximum number of tokens in one verify forward.

    Raises:
        UnsupportedOptionError: the cache is static, quantized or offloaded.
        UnsupportedTargetError: a layer is of a kind that cannot be rolled back, or layers are missing.
    """

    @torch.no_grad()
    def __init__(self, cache: Cache, model: PreTrainedModel, *, max_length: int, block_size: int):
        _refuse_other_caches(cache)
        self.cache = cache
        self._model = model
        self._max_length = max_length
        self._block_size = block_size
        self._originals = _all_layers(cache, model)
        self._layers = self._make_rollback_layers()
        self._block_layers = [layer for layer in self._layers if isinstance(layer, BlockLayer)]
        self._replay_groups = group_layers([layer for layer in self._layers if isinstance(layer, RecurrentLayer)])
        self._block_open = False
        self._unfinished_commit: tuple[torch.Tensor, int] | None = None

    def __enter__(self) -> "TargetCache":
        self._caller_layers = self.cache.layers
        self.cache.layers = self._layers
        for layer in self._block_layers:
            layer.start()
        return self

    def __exit__(self, exc_type, exc_value, traceback) -> None:
        try:
            if self._unfinished_commit is not None:
                self.commit(*self._unfinished_commit)
            elif exc_type is not None or self._block_open:
                self.roll_back()
        finally:
            self._hand_back()

    def _hand_back(self) -> None:
        """Restore the caller's own layer objects, with the committed state."""
        layers = [layer.release() if isinstance(layer, BlockLayer) else layer for layer in self._layers]
        if self.cache.layer_class_to_replicate is not None:
            layers = _drop_unused_layers(layers)
        self._caller_layers[:] = layers
        self.cache.layers = self._caller_layers

    def _make_rollback_layers(self) -> list:
        """Build a rollback layer for each layer that holds a state; empty layers are kept. The order stays the same."""
        config = self._model.config.get_text_config(decoder=True)
        layer_types = dict(enumerate(getattr(config, "layer_types", None) or []))
        has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._originals)
        mixers = mixers_by_layer(self._model) if has_states else {}
        return [
            layer
            if _is_empty(layer, layer_types.get(index))
            else self._make_rollback_layer(index, layer, *mixers.get(index, (None, Reading.TOGETHER)))
            for index, layer in enumerate(self._originals)
        ]

    def _make_rollback_layer(self, index: int, layer, mixer: nn.Module | None, reading: Reading) -> BlockLayer:
        if type(layer) not in ROLLBACK_LAYERS:
            problem = f"is a {type(layer).__name__}, which hf_dflash cannot roll back exactly"
        elif mixer is None and isinstance(layer, LinearAttentionCacheLayerMixin):
            problem = "has a recurrent state, but the target has no module that was recognized as its owner"
        else:
            plan = LayerPlan(self._max_length, self._block_size, self.cache, mixer, reading)
            return ROLLBACK_LAYERS[type(layer)](layer, plan)
        raise UnsupportedTargetError(
            f"Layer {index} of the cache of {type(self._model).__name__} {problem}. Generate without a draft. "
            f"Supported: {', '.join(sorted(kind.__name__ for kind in ROLLBACK_LAYERS))}."
        )

    def get_seq_length(self) -> int | None:
        """Return the tokens read so far, open block included; None if no layer counts them (recurrent layers only)."""
        return tokens_in(self.cache)

    def begin_block(self) -> None:
        """Treat everything read so far as committed. Call before each verify forward."""
        self._block_open = True
        for layer in self._block_layers:
            layer.begin_block()

    @torch.no_grad()
    def replaced_by(self, returned: Cache | None, num_inputs: int) -> bool:
        """Check after a forward that the target used this cache. If it used a new one, continue on that.

        Some targets start another cache within a call (Phi-3 where its RoPE switches): they read the whole text again,
        up to the anchor. The old cache gets its layers back as they were before the forward, and everything in the new
        one counts as committed.

        Args:
            returned: the cache in the forward's output; None if the target returns none.
            num_inputs: tokens that may be rolled back if they are rejected, anchor included; 1 if none are.

        Returns:
            whether the cache was replaced. `cache` is then the new one.

        Raises:
            UnsupportedTargetError: a block of several tokens was read into another cache, where rejected candidates
                cannot be rolled back, or a layer of the new cache cannot be rolled back.
            UnsupportedOptionError: the new cache is not a `DynamicCache`.
        """
        if returned is None or returned is self.cache:
            return False
        if num_inputs > 1:
            raise UnsupportedTargetError(
                f"{type(self._model).__name__} read a block of {num_inputs} tokens into another cache (a "
                f"{type(returned).__name__}) than the one that was prepared for it (a {type(self.cache).__name__}), so "
                "rejected candidates cannot be rolled back. Generate without a draft."
            )
        replacement = TargetCache(returned, self._model, max_length=self._max_length, block_size=self._block_size)
        self.roll_back()
        self._hand_back()
        vars(self).update(vars(replacement))
        self.__enter__()
        return True

    @torch.no_grad()
    def commit(self, kept: torch.Tensor, verified: int) -> None:
        """Bring every layer to the state it would have if only the first `kept[row]` of the last `verified` tokens had
        been read.

        Args:
            kept: `(batch,)` integers, `1 <= kept <= verified`.
            verified: number of tokens in the forward since `begin_block`.
        """
        rows = kept.tolist()
        if not all(1 <= row <= verified for row in rows):
            raise UnsupportedOptionError(f"kept must be in 1..{verified} (the verified tokens), got {rows}")
        self._unfinished_commit = (kept, verified)
        for group in self._replay_groups:
            group.replay(rows, verified)
        for layer in self._block_layers:
            layer.commit(rows, verified)
        self._block_open = False
        self._unfinished_commit = None

    @torch.no_grad()
    def roll_back(self) -> None:
        """Discard everything read since the last `begin_block`."""
        for layer in self._block_layers:
            layer.roll_back()
        self._block_open = False


def _refuse_other_caches(cache: Cache) -> None:
    """Raise, naming the kind, for anything but a `DynamicCache` that is not offloaded."""
    if isinstance(cache, StaticCache):
        kind = "a static cache (cache_implementation='static')"
    elif isinstance(cache, QuantizedCache):
        kind = "a quantized cache (cache_implementation='quantized')"
    elif getattr(cache, "offloading", False):
        kind = "an offloaded cache (cache_implementation='offloaded')"
    elif not isinstance(cache, DynamicCache):
        kind = f"a {type(cache).__name__}"
    else:
        return
    raise UnsupportedOptionError(
        f"A DFlash draft needs a DynamicCache on the target, found {kind}. Leave cache_implementation unset, or pass "
        "a DynamicCache(config=model.config)."
    )


def _all_layers(cache: DynamicCache, model: PreTrainedModel) -> list:
    """Return the layer objects of `cache`; a lazily built cache is extended to as many as the target uses."""
    expected = DynamicCache(config=model.config).layers
    layers = list(cache.layers)
    if cache.layer_class_to_replicate is not None:
        layers += [cache.layer_class_to_replicate() for _ in range(len(expected) - len(layers))]
    same = len(layers) == len(expected) and all(
        isinstance(layer, LinearAttentionCacheLayerMixin) == isinstance(wanted, LinearAttentionCacheLayerMixin)
        for layer, wanted in zip(layers, expected, strict=True)
    )
    if not same:
        raise UnsupportedTargetError(
            f"The cache has the layers {_kinds(layers)}, but {type(model).__name__} needs {_kinds(expected)}. Use the "
            "cache of an earlier turn on the same model, or DynamicCache(config=model.config)."
        )
    return layers


def _kinds(layers: list) -> str:
    """Count the layers of each class, for a message."""
    counts = Counter(type(layer).__name__ for layer in layers)
    return " + ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _is_empty(layer, layer_type: str | None) -> bool:
    """Whether a layer is always empty. Before `DummyLayer`, layers without attention had an unused recurrent one."""
    return type(layer) in EMPTY_LAYERS or (type(layer) is LinearAttentionLayer and layer_type in ("moe", "mlp"))


def _drop_unused_layers(layers: list) -> list:
    """Drop layers after the last one that was written, as in a lazily filled cache."""
    used = [index for index, layer in enumerate(layers) if layer.is_initialized]
    return layers[: used[-1] + 1] if used else []
