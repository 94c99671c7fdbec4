"""`hf-dflash generate`: one answer.

Owns: where the prompt comes from and how the answer goes out. Does not know: decoding, loading.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import TextStreamer

from hf_dflash.bench.pair import Pair, encode, load_pair, sampling_arguments
from hf_dflash.cli import options
from hf_dflash.cli.show import comparison_words, diagnostics, statistics_table
from hf_dflash.comparison import Comparison, compare_texts
from hf_dflash.outputs import DFlashStatistics

DIFFERENT = 1


def generate(
    target: options.Target,
    draft: options.Draft,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; left out or '-': standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.", exists=True)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the target's chat template.")] = False,
    system: options.System = None,
    template: options.Template = "{}",
    max_new_tokens: options.MaxNewTokens = 256,
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
    as_json: options.Json = False,
    trace: options.Trace = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Also decode without the draft and compare; exit code 1 if the texts differ."),
    ] = False,
) -> None:
    """Answer one prompt.

    The answer goes to standard output, everything else to standard error.
    """
    text = read_prompt(prompt, file)
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
    arguments = {
        "max_new_tokens": max_new_tokens,
        **sampling_arguments(temperature, top_p, top_k, min_p, repetition_penalty),
    }
    drafting = {"block_size": block_size, "trace": trace}
    answer = Answer(pair, messages(text, system) if chat or system else text, arguments, seed)
    answer.decode({name: value for name, value in drafting.items() if value is not None}, stream=not as_json)
    comparison = None
    if check:
        answer.decode_plainly(stream=False)
        comparison = answer.compare_with_plain()
    if as_json:
        print(json.dumps(answer.as_dict(comparison), ensure_ascii=False, indent=2))
    else:
        answer.report(stats, comparison)
    if comparison is not None and not comparison.same and not comparison.within_rounding:
        raise typer.Exit(DIFFERENT)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or standard input.

    Raises:
        typer.BadParameter: two sources at once, or nothing in the one there is.
    """
    if file is not None and prompt is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if file is not None:
        text = file.read_text(encoding="utf-8")
    else:
        text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    return text


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """One turn of a chat, behind a system message where there is one."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


class Answer:
    """One prompt and what was decoded from it.

    Args:
        pair: target, tokenizer and draft.
        prompt: a text, or messages for the chat template.
        arguments: arguments of `generate` that plain decoding takes too.
        seed: set before each decoding; None draws a fresh one and uses it for both.
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
        """Everything a script may want to know, in JSON's types."""
        new_ids = self.ids[self.prompt_length :]
        said = {
            "text": self.pair.tokenizer.decode(new_ids, skip_special_tokens=True),
            "token_ids": new_ids.tolist(),
            "prompt_tokens": self.prompt_length,
            "new_tokens": len(new_ids),
            "seconds": self.seconds,
            "seed": self.seed,
            "statistics": self.statistics[0].as_dict(),
        }
        if comparison is not None:
            said["check"] = {**asdict(comparison), "same": comparison.same, "plain_seconds": self.plain_seconds}
        return said

    def report(self, stats: bool, comparison: Comparison | None) -> None:
        """Print the figures that were asked for."""
        console = diagnostics()
        if stats:
            console.print(statistics_table(self.statistics[0]))
        if comparison is not None:
            console.print(f"same text as plain generate: {comparison_words(comparison)}")
            console.print(f"plain {self.plain_seconds:.2f} s, with the draft {self.seconds:.2f} s")
