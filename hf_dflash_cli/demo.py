"""`hf-dflash demo`: a real chat model answers with and without its draft.

Owns: the demonstration's prompt and what it shows. Does not know: where the models lie, how they decode.
"""

from typing import Annotated

import typer
from rich.console import Console

from hf_dflash.bench.pair import load_pair, sampling_arguments
from hf_dflash.bench.smollm2 import draft_folder, target_folder
from hf_dflash.cli import options
from hf_dflash.cli.generate import Answer, messages
from hf_dflash.cli.show import acceptance_bars, comparison_words, two_columns
from hf_dflash.comparison import Comparison

# A small model's two best tokens are often within bfloat16 rounding; on this prompt they were not where it was tried.
# The draft was not trained on it, and its speed-up is that of everyday prompts in the middle.
PROMPT = "How do I change a flat tyre?"


def demo(
    prompt: Annotated[str, typer.Argument(help="What the chat model is asked.")] = PROMPT,
    max_new_tokens: options.MaxNewTokens = 128,
    block_size: options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    dtype: options.Dtype = "bfloat16",
) -> None:
    """Let SmolLM2-135M-Instruct answer twice, plainly and through its draft, and compare.

    The first run fetches and unpacks the model; later runs work offline.
    """
    console = Console(highlight=False)
    folder, draft = target_folder(say=console.print), draft_folder()
    pair = load_pair(str(folder), str(draft), dtype=dtype)
    arguments = {"max_new_tokens": max_new_tokens, **sampling_arguments(temperature)}
    drafting = {"block_size": block_size} if block_size else {}

    warm_up = Answer(pair, messages(prompt, None), {**arguments, "max_new_tokens": 16}, seed)
    warm_up.decode(drafting, stream=False)
    warm_up.decode_plainly(stream=False)

    answer = Answer(pair, messages(prompt, None), arguments, seed)
    console.rule("SmolLM2-135M-Instruct")
    console.print(f"[bold]{prompt}[/bold]\n")
    console.rule("plain generate", style="dim")
    answer.decode_plainly(stream=True)
    console.rule("with the DFlash draft", style="dim")
    answer.decode(drafting, stream=True)
    show_result(console, answer, answer.compare_with_plain())
    console.print(
        f"\nGo on with your own questions:\n  hf-dflash chat --target {folder} --draft {draft}", soft_wrap=True
    )


def show_result(console: Console, answer: Answer, comparison: Comparison) -> None:
    """The demonstration's last lines: same text, tokens per second, speed-up, tau, bars."""
    statistics = answer.statistics[-1]
    new_tokens = len(answer.ids) - answer.prompt_length
    plain_tokens = len(answer.plain_ids) - answer.prompt_length
    plain_rate, rate = plain_tokens / answer.plain_seconds, new_tokens / answer.seconds
    console.rule("result")
    table = two_columns()
    table.add_row("same text?", comparison_words(comparison))
    if not comparison.same and comparison.dtype != "float32":
        table.add_row("", "--dtype float32 has no such rounding: slower, and the same token for token")
    table.add_row("plain generate", f"{plain_rate:.1f} tokens/s")
    table.add_row("with the draft", f"{rate:.1f} tokens/s")
    table.add_row("speed-up", f"{rate / plain_rate:.2f}")
    table.add_row("tau", f"{statistics.tau:.2f} tokens per forward of the target (plain: 1)")
    console.print(table)
    console.print("\nHow often the draft's guess was accepted up to each position of its block:")
    console.print(acceptance_bars(statistics.acceptance_by_position))
    console.print("\nThe draft only guesses. Every token above is the target's own choice, checked by the target.")
