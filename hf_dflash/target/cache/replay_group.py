"""Layers that are replayed together, and the trust that a replay has to earn.

Owns: the grouping of recurrent layers by replay and shape, and the comparison of a replay with what a forward really
did.

Does not know: the recurrences, attention, the rest of a cache layer.
"""

from typing import Protocol

from torch import nn

from hf_dflash.target.cache.delta_rule import ChannelDeltaReplay, DeltaReplay
from hf_dflash.target.cache.replay import BlockRecord, Replay
from hf_dflash.target.cache.state_space import StateSpaceReplay

REPLAYS: tuple[type[Replay], ...] = (DeltaReplay, ChannelDeltaReplay, StateSpaceReplay)

#: A replay is used once it has reproduced what a forward did to the states up to this share of the change. A formula
#: that is not the layer's is off by its own size; rounding, of bf16 kernels too, stays far below.
TRUSTED_ERROR = 0.1

#: Layers in a group on a CPU, where a small working set matters; an accelerator wants few kernels, so all go together.
LAYERS_ON_CPU = 3


class Replayable(Protocol):
    """What a group needs of a layer."""

    mixer: nn.Module

    def record(self) -> BlockRecord | None:
        """What the layer recorded of the open block; None if a part is missing."""

    def take_over(self, state) -> None:
        """The recurrent state after the accepted tokens, to be adopted by the next commit."""


class ReplayGroup:
    """Layers of one shape whose states are moved on together."""

    def __init__(self, replay: type[Replay], layers: list[Replayable]):
        self._layers = layers
        self._replay = replay([layer.mixer for layer in layers])
        self._is_trusted = False

    def replay(self, kept: list[int], verified: int) -> None:
        """Give each layer its state after the first `kept[row]` of `verified` tokens, if the replay can be trusted."""
        records = [layer.record() for layer in self._layers]
        if verified == 1 or any(record is None for record in records):
            return
        self._is_trusted = self._is_trusted or self._reproduces(records, verified)
        if self._is_trusted and min(kept) < verified:
            states = self._replay.advance(records, kept, overwrite=True)
            for layer, state in zip(self._layers, states, strict=True):
                layer.take_over(state)

    def _reproduces(self, records: list[BlockRecord], verified: int) -> bool:
        """Whether the replay of the whole block gives every state that the forward left behind."""
        rows = [verified] * records[0].after.shape[0]
        states = self._replay.advance(records, rows, overwrite=False)
        return all(
            bool((state - record.after).norm() <= TRUSTED_ERROR * (record.after - record.start()).norm())
            for state, record in zip(states, records, strict=True)
        )


def replay_for(mixer: nn.Module) -> type[Replay] | None:
    """The replay that understands a mixer, unless its weights are only there while it runs (accelerate's offload)."""
    if any(parameter.is_meta for parameter in mixer.parameters()):
        return None
    return next((replay for replay in REPLAYS if replay.understands(mixer)), None)


def group_layers(layers: list[Replayable]) -> list[ReplayGroup]:
    """Layers with a replay, grouped by replay, shapes and device."""
    groups: dict[tuple, list[Replayable]] = {}
    for layer in layers:
        replay = replay_for(layer.mixer)
        if replay is not None:
            shapes = tuple((tuple(p.shape), p.dtype, p.device) for p in layer.mixer.parameters(recurse=False))
            convolution = layer.mixer.conv1d.weight
            key = (replay, shapes, tuple(convolution.shape), convolution.dtype, convolution.device)
            groups.setdefault(key, []).append(layer)
    return [
        ReplayGroup(replay, members[start : start + size])
        for (replay, *_, device), members in groups.items()
        for size in [LAYERS_ON_CPU if device.type == "cpu" else len(members)]
        for start in range(0, len(members), size)
    ]
