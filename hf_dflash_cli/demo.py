"""`hf-dflash demo`: a small chat model answers a few prompts with and without its draft.

Which prompts and what the summary shows; finding the models is left to `hf_dflash.smollm2`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_dflash_cli import options
from hf_dflash_cli.show import acceptance_bars, comparison_words

if TYPE_CHECKING:
    from hf_dflash.decoding.comparison import Comparison
    from hf_dflash_cli.answer import Answer

#: Kind -> prompt, one each of code, explanation and list. The draft was trained on none of them.
PROMPTS = {
    "code": "Write a Python function that checks whether a word is a palindrome.",
    "explanation": "Why does bread rise when it is baked?",
    "list": "Make a packing list for a weekend at the beach.",
}


def demo(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Your own prompt instead; may be repeated.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    block_size: options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    dtype: options.Dtype = "bfloat16",
    device_map: options.DeviceMap = None,
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="Another draft for SmolLM2-135M-Instruct.")] = None,
) -> None:
    """Answer a few prompts with and without a draft, and compare.

    The model is SmolLM2-135M-Instruct. The first run downloads and unpacks it; later runs work offline.
    """
    from hf_dflash.pair import sampling_arguments
    from hf_dflash.smollm2 import demo_draft, demo_target
    from hf_dflash_cli.answer import Answer, messages
    from hf_dflash_cli.loading import load

    console = Console(highlight=False)
    folder, draft = demo_target(log=console.print), draft or str(demo_draft(log=console.print))
    pair = load(str(folder), draft, block_size=block_size, dtype=dtype, device_map=device_map)
    arguments = {"max_new_tokens": max_new_tokens, **sampling_arguments(temperature)}
    drafting = {"block_size": block_size} if block_size else {}
    prompts = {f"prompt {number}": text for number, text in enumerate(prompt, start=1)} if prompt else PROMPTS

    # The first call of anything is slower than those after it.
    warm_up = Answer(pair, messages(next(iter(prompts.values())), None), {**arguments, "max_new_tokens": 16}, seed)
    warm_up.decode(drafting, stream=False)
    warm_up.decode_plainly(stream=False)

    answers = {}
    for kind, text in prompts.items():
        answers[kind] = Answer(pair, messages(text, None), arguments, seed)
        show_answer(console, kind, text, answers[kind], drafting)
    show_summary(console, answers, {kind: answer.compare_with_plain() for kind, answer in answers.items()})
    console.print(f"\nTry your own prompts:\n  hf-dflash chat --target {folder} --draft {draft}", soft_wrap=True)


def show_answer(console: Console, kind: str, prompt: str, answer: Answer, drafting: dict[str, Any]) -> None:
    """Decode one prompt both ways, streaming both answers."""
    console.rule(f"[bold]{kind}[/bold]")
    console.print(f"[bold]{prompt}[/bold]\n")
    console.rule("plain generate", style="dim")
    answer.decode_plainly(stream=True)
    console.rule("with the DFlash draft", style="dim")
    answer.decode(drafting, stream=True)


def show_summary(console: Console, answers: dict[str, Answer], comparisons: dict[str, Comparison]) -> None:
    """One row per prompt, the medians over all of them, and acceptance by position."""
    from hf_dflash.decoding.statistics import DFlashStatistics

    table = Table()
    for column in ("prompt", "plain, tokens/s", "with draft", "speed-up", "tau", "same text?"):
        table.add_column(column, justify="left" if column in ("prompt", "same text?") else "right")
    rows, rounds = [], DFlashStatistics()
    for kind, answer in answers.items():
        rows.append(metrics(answer))
        rounds.proposed += answer.statistics[-1].proposed
        rounds.accepted += answer.statistics[-1].accepted
        table.add_row(kind, *_formatted(rows[-1]), _sameness(comparisons[kind]))
    if len(rows) > 1:
        same = sum(each.same for each in comparisons.values())
        ties = sum(bool(each.within_tolerance) for each in comparisons.values() if not each.same)
        agreement = f"{same} of {len(rows)}" + (f", {ties} up to a tie" if ties else "")
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        table.add_section()
        table.add_row("median", *_formatted(medians), agreement, style="bold")
    console.rule("result")
    console.print(table)
    for kind, comparison in comparisons.items():
        console.print(f"{kind}: same text? {comparison_words(comparison)}")
    if any(not each.same and each.dtype != "float32" for each in comparisons.values()):
        console.print("In float32 (--dtype float32, slower) the texts are the same token for token.")
    console.print("\nHow often all candidates up to each position of a block were accepted:")
    console.print(acceptance_bars(rounds.acceptance_by_position))
    console.print(
        "\ntau is the number of tokens per forward of the target (plain: 1). The draft only proposes: every token is "
        "the target's own choice."
    )


def metrics(answer: Answer) -> tuple[float, float, float, float]:
    """Tokens per second without and with the draft, speed-up, tau."""
    plain = (len(answer.plain_ids) - answer.prompt_length) / answer.plain_seconds
    drafted = (len(answer.ids) - answer.prompt_length) / answer.seconds
    return plain, drafted, drafted / plain, answer.statistics[-1].tau


def _sameness(comparison: Comparison) -> str:
    if comparison.same:
        return "yes"
    token = comparison.first_difference + 1
    return f"up to a near tie at {token}" if comparison.within_tolerance else f"NO, from token {token}"


def _formatted(row: Any) -> list[str]:
    plain, drafted, speed_up, tau = row
    return [f"{plain:.1f}", f"{drafted:.1f}", f"{speed_up:.2f}", f"{tau:.2f}"]
