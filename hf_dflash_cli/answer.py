"""One prompt and the answers decoded from it, with and without the draft, shared by the commands that show them.

What the numbers look like on a terminal is left to `show`.
"""

import time
from dataclasses import asdict
from typing import Any

import torch
from transformers import TextStreamer

from hf_dflash.decoding.comparison import Comparison, compare_texts
from hf_dflash.decoding.statistics import DFlashStatistics
from hf_dflash.pair import Pair, encode
from hf_dflash_cli.show import comparison_words, diagnostics, statistics_table


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """One turn of a chat, after a system message if there is one."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


class Answer:
    """One prompt and what was decoded from it.

    Args:
        pair: target, tokenizer and draft.
        prompt: a text, or messages for the chat template.
        arguments: arguments of `generate` that plain decoding takes too.
        seed: set before each decoding; None draws a new one and uses it for both.
    """

    def __init__(self, pair: Pair, prompt: str | list[dict[str, str]], arguments: dict[str, Any], seed: int | None):
        self.pair = pair
        self.arguments = arguments
        self.seed = torch.seed() % 2**31 if seed is None else seed
        self.inputs = encode(pair, prompt)
        self.statistics: list[DFlashStatistics] = []

    def decode(self, drafting: dict[str, Any], stream: bool) -> None:
        """Decode with the draft, and print the text as it comes if `stream`."""
        drafting = {**drafting, "assistant_model": self.pair.draft, "stats": self.statistics.append}
        self.ids, self.seconds = self._run(stream, drafting)

    def decode_plainly(self, stream: bool) -> None:
        """Decode without the draft, with the same seed."""
        self.plain_ids, self.plain_seconds = self._run(stream, {})

    def _run(self, stream: bool, extra: dict[str, Any]) -> tuple[torch.Tensor, float]:
        if stream:
            extra = {**extra, "streamer": TextStreamer(self.pair.tokenizer, skip_prompt=True, skip_special_tokens=True)}
        torch.manual_seed(self.seed)
        start = time.perf_counter()
        ids = self.pair.target.generate(**self.inputs, **self.arguments, **extra)[0].cpu()
        return ids, time.perf_counter() - start

    @property
    def prompt_length(self) -> int:
        return self.inputs["input_ids"].shape[1]

    def compare_with_plain(self) -> Comparison:
        """Compare the two texts that were decoded."""
        return compare_texts(self.pair.target, self.inputs, self.plain_ids, self.ids, seed=self.seed, **self.arguments)

    def as_dict(self, comparison: Comparison | None) -> dict[str, Any]:
        """Everything a script may need, in JSON types."""
        new_ids = self.ids[self.prompt_length :]
        result = {
            "text": self.pair.tokenizer.decode(new_ids, skip_special_tokens=True),
            "token_ids": new_ids.tolist(),
            "prompt_tokens": self.prompt_length,
            "new_tokens": len(new_ids),
            "seconds": self.seconds,
            "seed": self.seed,
            "statistics": self.statistics[0].as_dict(),
        }
        if comparison is not None:
            result["check"] = {**asdict(comparison), "same": comparison.same, "plain_seconds": self.plain_seconds}
        return result

    def report(self, stats: bool, comparison: Comparison | None) -> None:
        """Print the metrics that were asked for."""
        console = diagnostics()
        if stats:
            console.print(statistics_table(self.statistics[0]))
        if comparison is not None:
            console.print(f"same text as plain generate: {comparison_words(comparison)}")
            console.print(f"plain {self.plain_seconds:.2f} s, with the draft {self.seconds:.2f} s")
