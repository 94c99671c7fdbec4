"""Groups of recurrent layers that are replayed together, once the replay has matched an actual forward."""

from typing import Protocol

from torch import nn

from hf_dflash.target.cache.delta_rule import ChannelDeltaReplay, DeltaReplay
from hf_dflash.target.cache.replay import BlockRecord, Replay
from hf_dflash.target.cache.state_space import StateSpaceReplay

REPLAYS: tuple[type[Replay], ...] = (DeltaReplay, ChannelDeltaReplay, StateSpaceReplay)

#: A replay is used once it has reproduced a forward's change to the states within this relative error. A formula other
#: than the layer's is off by about 100%; rounding stays far below this, even for bf16 kernels.
TRUSTED_ERROR = 0.1

#: Layers per group on a CPU, for a small working set. On an accelerator all go together, for fewer kernel launches.
LAYERS_ON_CPU = 3


class Replayable(Protocol):
    """What a group needs from a layer."""

    mixer: nn.Module

    def record(self) -> BlockRecord | None:
        """Return what the layer recorded of the open block; None if any of it is missing."""

    def set_replayed(self, state) -> None:
        """Set the recurrent state after the accepted tokens, for the next commit."""


class ReplayGroup:
    """Layers of one shape whose states are advanced together."""

    def __init__(self, replay: type[Replay], layers: list[Replayable]):
        self._layers = layers
        self._replay = replay([layer.mixer for layer in layers])
        self._is_trusted = False

    def replay(self, kept: list[int], verified: int) -> None:
        """Set each layer's state after the first `kept[row]` of `verified` tokens, if the replay can be trusted."""
        records = [layer.record() for layer in self._layers]
        if verified == 1 or any(record is None for record in records):
            return
        self._is_trusted = self._is_trusted or self._reproduces(records, verified)
        if self._is_trusted and min(kept) < verified:
            states = self._replay.advance(records, kept, overwrite=True)
            for layer, state in zip(self._layers, states, strict=True):
                layer.set_replayed(state)

    def _reproduces(self, records: list[BlockRecord], verified: int) -> bool:
        """Whether replaying the whole block gives the same states as the forward did."""
        rows = [verified] * records[0].after.shape[0]
        states = self._replay.advance(records, rows, overwrite=False)
        return all(
            bool((state - record.after).norm() <= TRUSTED_ERROR * (record.after - record.start()).norm())
            for state, record in zip(states, records, strict=True)
        )


def replay_for(mixer: nn.Module) -> type[Replay] | None:
    """Return the replay that supports a mixer; None if its weights are only present while it runs (offloading)."""
    if any(parameter.is_meta for parameter in mixer.parameters()):
        return None
    return next((replay for replay in REPLAYS if replay.supports(mixer)), None)


def group_layers(layers: list[Replayable]) -> list[ReplayGroup]:
    """Group the layers that have a replay by replay, shapes and device."""
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
