"""RoPE whose frequencies depend on the length of the text, and how many tokens a forward may read because of it.

transformers computes such frequencies in every forward, from the largest position that it reads:

- `longrope` (Phi-3.5, Phi-4-mini, MiniCPM): one set of factors up to the original length, another beyond it.
- `dynamic` NTK (InternLM): fixed up to the original length; beyond it they change with every token.

Plain decoding rotates each token by the frequencies of the text that ends with it; a block is rotated by those of its
last token. So a block may only hold tokens that share their frequencies. The other kinds (linear, yarn, llama3,
proportional) do not depend on the length.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_dflash.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class LengthDependentRope:
    """The lengths at which the frequencies of a target's RoPE change; none for most targets.

    Attributes:
        switches: a text longer than one of these lengths has other frequencies than a shorter one (`longrope`).
        drifts_after: in a text longer than this, every token changes the frequencies (`dynamic`); None if they never
            drift.
    """

    switches: frozenset[int] = frozenset()
    drifts_after: int | None = None

    def __bool__(self) -> bool:
        """Whether the frequencies depend on the length at all."""
        return self.first_change < sys.maxsize

    @property
    def first_change(self) -> int:
        """The longest text that still has the frequencies of a text of one token."""
        return min(self._changes(), default=sys.maxsize)

    def block_limit(self, position: int) -> int:
        """Return the most tokens that a forward may read if its first token is at `position` (0-based).

        Example:
            a switch at 32. From position 28 a forward may read the 4 tokens 28 to 31, which end in a text of 32 tokens.
            The token at 32 makes a text of 33, so it starts another forward, which may be of any size.
        """
        if self.drifts_after is not None and position >= self.drifts_after:
            logger.warning_once(
                f"Beyond {self.drifts_after} tokens, the RoPE of this target ('dynamic') changes with every token, so "
                "a block cannot be verified at once. From there the text is decoded token by token, without the draft."
            )
            return 1
        return min((length - position for length in self._changes() if length > position), default=sys.maxsize)

    def _changes(self) -> Iterator[int]:
        yield from self.switches
        if self.drifts_after is not None:
            yield self.drifts_after


def length_dependent_rope(model: PreTrainedModel) -> LengthDependentRope:
    """Return where the frequencies of a target's RoPE change with the length, over all its layer types."""
    switches, drifts = set(), set()
    for kind, original in _kinds(model):
        # As transformers tells them apart: "dynamic" may be a part of the name.
        if "dynamic" in kind:
            drifts.add(original)
        elif kind == "longrope":
            switches.add(original)
    return LengthDependentRope(frozenset(switches), min(drifts, default=None))


def _kinds(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield each kind of RoPE in the target's decoder and its original length in tokens.

    The rotary modules are asked first: some have a kind of their own for parameters of another name (Hunyuan's
    "dynamic" with a fixed alpha). If there is none (a model with code of its own), the configuration is.
    """
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    modules = [module for module in decoder.modules() if isinstance(vars(module).get("rope_type"), (str, dict))]
    for module in modules:
        parameters = getattr(getattr(module, "config", config), "rope_parameters", None) or {}
        if isinstance(module.rope_type, str):
            yield module.rope_type, _original_length(module.rope_type, parameters, module, config)
        else:
            for layer_type, kind in module.rope_type.items():
                yield kind, _original_length(kind, parameters.get(layer_type) or {}, module, config)
    if not modules:
        parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
        for each in by_layer_type or [parameters]:
            kind = each.get("rope_type") or each.get("type") or "default"
            yield kind, _original_length(kind, each, config, config)


def _original_length(kind: str, parameters: dict[str, Any], module: Any, config: Any) -> int:
    """Return the length that transformers compares with: the module's for `dynamic`, the parameters' for `longrope`."""
    lengths = [parameters.get("original_max_position_embeddings")]
    if "dynamic" in kind:
        lengths = [getattr(module, "original_max_seq_len", None)]
    lengths += [getattr(config, name, None) for name in ("original_max_position_embeddings", "max_position_embeddings")]
    return next((int(length) for length in lengths if length is not None), sys.maxsize)
