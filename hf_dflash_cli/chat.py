"""`hf-dflash chat`: a conversation.

Owns: the turns, the commands between them, and the cache that is kept over turns. Does not know: decoding, loading.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from transformers import Cache, DynamicCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_dflash.bench.pair import Pair, encode, load_pair, sampling_arguments
from hf_dflash.cache import CACHE_KEYWORD
from hf_dflash.cli import options
from hf_dflash.cli.show import diagnostics, statistics_table
from hf_dflash.errors import DFlashError
from hf_dflash.outputs import DFlashStatistics

HELP = """\
/stats      figures of the last answer
/block N    tokens per block from now on; /block alone: the draft's own
/reset      forget the conversation
/quit       leave (Ctrl-D does too; Ctrl-C stops an answer)"""


def chat(
    target: options.Target,
    draft: options.Draft,
    system: options.System = None,
    template: options.Template = "{}",
    max_new_tokens: options.MaxNewTokens = 1024,
    block_size: options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    stats: options.Stats = False,
) -> None:
    """Talk with the target, turn by turn.

    /help lists the commands; Ctrl-C stops an answer, not the program.
    """
    pair = load_pair(
        target,
        draft,
        options.template_arguments(template),
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
    )
    if seed is not None:
        torch.manual_seed(seed)
    arguments = {
        "max_new_tokens": max_new_tokens,
        **sampling_arguments(temperature, top_p, top_k, min_p, repetition_penalty),
    }
    talk(Conversation(pair, arguments, system, block_size), always_stats=stats)


def talk(conversation: "Conversation", always_stats: bool = False) -> None:
    """Read turns from standard input until it ends or /quit."""
    with suppress(ImportError):  # line editing and recall in `input`, where the system has it
        import_module("readline")
    console = diagnostics()
    console.print("Talk; /help lists the commands.", style="dim")
    while True:
        try:
            line = input("\n> ").strip()
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D leaves", style="dim")
            continue
        except EOFError:
            console.print()
            return
        command, *words = line.split() or [""]
        if command == "/quit":
            return
        if command.startswith("/"):
            console.print(obey(conversation, command, words))
        elif command:
            conversation.answer(line)
            if always_stats:
                console.print(statistics_table(conversation.statistics))


def obey(conversation: "Conversation", command: str, words: list[str]) -> Any:
    """Carry out a command between turns; what there is to show."""
    if command == "/help":
        return HELP
    if command == "/reset":
        conversation.reset()
        return "The conversation begins anew."
    if command == "/stats":
        known = conversation.statistics
        return statistics_table(known) if known is not None else "No answer yet."
    if command == "/block":
        try:
            conversation.set_block_size(int(words[0]) if words else None)
        except (ValueError, DFlashError) as error:
            return str(error) if isinstance(error, DFlashError) else "/block takes a number of tokens."
        return f"Blocks of {conversation.block_size} tokens from now on."
    return f"There is no command {command}.\n{HELP}"


class _Remembering(BaseStreamer):
    """A streamer that also keeps the new tokens, for an answer that is interrupted."""

    def __init__(self, streamer: BaseStreamer):
        self.new_tokens: list[int] = []
        self._streamer = streamer
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.new_tokens += value.flatten().tolist()
        self._prompt_came = True
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


@dataclass
class Conversation:
    """The turns so far, and the cache that has read them.

    Attributes:
        pair: target, tokenizer and draft.
        arguments: arguments of `generate` for every turn.
        system: system message, or None.
        block_size: tokens per block; None for the draft's own.
        statistics: of the last answer that was finished; None before it.
    """

    pair: Pair
    arguments: dict[str, Any]
    system: str | None = None
    block_size: int | None = None
    statistics: DFlashStatistics | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _cache: Cache | None = None
    _read: torch.LongTensor | None = None  # (length,) what the cache has read, and at least one token more

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages, self._cache, self._read = [], None, None

    def set_block_size(self, block_size: int | None) -> None:
        """Choose the tokens per block of the coming turns; None for the draft's own.

        Raises:
            UnsupportedOptionError: less than 2, or more than the draft was trained for.
        """
        self.block_size = self.pair.draft.config.checked_block_size(block_size)

    def answer(self, text: str) -> None:
        """Put a user's turn and stream the answer. Ctrl-C ends the answer and keeps what was said so far."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        inputs = encode(self.pair, system + self.messages)
        input_ids = inputs["input_ids"]
        self._cache = self._cache_for(input_ids)
        streamer = _Remembering(TextStreamer(self.pair.tokenizer, skip_prompt=True, skip_special_tokens=True))
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
            # The call may have been left in the middle of a block: the next turn reads everything anew.
            self._cache, self._read = None, None
            print()
        answer = self.pair.tokenizer.decode(streamer.new_tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})

    def _cache_for(self, input_ids: torch.LongTensor) -> Cache:
        """The cache cut to what it shares with the `(1, length)` prompt; a new one where it cannot be cut or shares
        nothing.

        Example: the cache has read [5, 6, 7, 8] and the prompt is [5, 6, 9, 9, 9]: its last 2 tokens are cut.
        """
        if self._cache is not None and self._read is not None:
            length = self._cache.get_seq_length()
            common = min(length, input_ids.shape[1] - 1)
            same = int((self._read[:common] == input_ids[0, :common]).long().cumprod(dim=0).sum())
            if same and _cut(self._cache, length - same):
                return self._cache
        return DynamicCache(config=self.pair.target.config)

    def _keep_statistics(self, statistics: DFlashStatistics) -> None:
        self.statistics = statistics


def _cut(cache: Cache, tokens: int) -> bool:
    """Remove the last tokens from a cache; False where one of its layers cannot do that."""
    if not tokens:
        return True
    if not cache.is_croppable:
        return False
    try:
        cache.crop(-tokens)
    except RuntimeError:  # a sliding layer that is past its window
        return False
    return True
