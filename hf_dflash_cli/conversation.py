"""A conversation over turns: what was said, and the cache that already holds it.

Reading commands from the terminal is left to `chat`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_dflash.decoding.statistics import DFlashStatistics
from hf_dflash.pair import Pair, encode
from hf_dflash.target.cache import CACHE_KEYWORD


class _RecordingStreamer(BaseStreamer):
    """A streamer that also records the new tokens, for an answer that is interrupted."""

    def __init__(self, streamer: BaseStreamer):
        self.new_tokens: list[int] = []
        self._streamer = streamer
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.new_tokens += value.flatten().tolist()
        self._prompt_seen = True
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


@dataclass
class Conversation:
    """The turns so far, and the cache that holds them.

    Attributes:
        pair: target, tokenizer and draft.
        arguments: arguments of `generate` for every turn.
        system: system message, or None.
        block_size: tokens per block; None for the draft's own.
        statistics: of the last finished answer; None before the first.
    """

    pair: Pair
    arguments: dict[str, Any]
    system: str | None = None
    block_size: int | None = None
    statistics: DFlashStatistics | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _cache: Cache | None = None
    _read: torch.LongTensor | None = None  # (length,) tokens in the cache, and at least one more

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages, self._cache, self._read = [], None, None

    def set_block_size(self, block_size: int | None) -> None:
        """Set the tokens per block for the following turns; None for the draft's own.

        Raises:
            UnsupportedOptionError: less than 2, or more than the draft was trained for.
        """
        self.block_size = self.pair.draft.config.checked_block_size(block_size)

    def answer(self, text: str) -> None:
        """Add a user turn and stream the answer. Ctrl-C ends the answer and keeps the part that was streamed."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        inputs = encode(self.pair, system + self.messages)
        input_ids = inputs["input_ids"]
        self._cache = self._cache_for(input_ids)
        streamer = _RecordingStreamer(TextStreamer(self.pair.tokenizer, skip_prompt=True, skip_special_tokens=True))
        try:
            ids = self.pair.target.generate(
                **inputs,
                **self.arguments,
                **{CACHE_KEYWORD: self._cache},
                **({"block_size": self.block_size} if self.block_size else {}),
                assistant_model=self.pair.draft,
                streamer=streamer,
                stats=self._keep_statistics,
            )
            self._read = ids[0]
        except KeyboardInterrupt:
            # The call may have ended in the middle of a block: the next turn prefills from the start.
            self._cache, self._read = None, None
            print()
        answer = self.pair.tokenizer.decode(streamer.new_tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})

    def _cache_for(self, input_ids: torch.LongTensor) -> Cache:
        """The cache cropped to the prefix it shares with the `(1, length)` prompt; a new one if it cannot be cropped or
        shares nothing.

        Example: the cache holds [5, 6, 7, 8] and the prompt is [5, 6, 9, 9, 9]: its last 2 tokens are cropped.
        """
        if self._cache is not None and self._read is not None:
            length = self._cache.get_seq_length()
            common = min(length, input_ids.shape[1] - 1)
            same = int((self._read[:common] == input_ids[0, :common]).long().cumprod(dim=0).sum())
            if same and _crop(self._cache, length - same):
                return self._cache
        return DynamicCache(config=self.pair.target.config)

    def _keep_statistics(self, statistics: DFlashStatistics) -> None:
        self.statistics = statistics


def _crop(cache: Cache, tokens: int) -> bool:
    """Remove the last tokens from a cache; False if one of its layers cannot do that."""
    if not tokens:
        return True
    if not cache.is_croppable:
        return False
    try:
        cache.crop(-tokens)
    except RuntimeError:  # a sliding layer past its window
        return False
    return True
