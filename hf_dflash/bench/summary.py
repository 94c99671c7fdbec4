"""Many runs as a few rows.

Owns: what a median, a spread, an acceptance length of many prompts is. Does not know: how the runs came about or how
rows look.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hf_dflash.bench.runner import Run
from hf_dflash.decoding.statistics import PHASES

Key = tuple[str, str, str, float, str]


@dataclass(frozen=True)
class Row:
    """One method on one prompt set at one temperature.

    Attributes:
        target, draft, prompt_set, temperature, method: what was run.
        prompts: how many different prompts.
        tokens_per_second: median over the prompts, each the median of its repeats.
        speed_up: median over the prompts of this method's tokens per second over plain's on the same prompt and repeat.
        speed_up_low, speed_up_high: quartiles of the same.
        tau: tokens behind the prefill over forwards behind it, all runs together.
        efficiency: speed_up / tau.
        compared, same, near_ties: runs compared with plain generate, those with the same ids, and those that part where
            rounding explains it.
        peak_memory: largest of all runs, in bytes; None on the CPU.
        acceptance_by_position: share of rounds that accepted at least that many candidates; empty for methods without
            statistics.
        time_shares: share of the call by phase, `rest` included; empty likewise.
    """

    target: str
    draft: str
    prompt_set: str
    temperature: float
    method: str
    prompts: int
    tokens_per_second: float
    speed_up: float
    speed_up_low: float
    speed_up_high: float
    tau: float | None
    efficiency: float | None
    compared: int
    same: int
    near_ties: int
    peak_memory: int | None
    acceptance_by_position: list[float]
    time_shares: dict[str, float]


def summarize(runs: list[Run]) -> list[Row]:
    """One row per target, draft, prompt set, temperature and method, each in the order in which it first ran."""
    groups: dict[Key, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.target, run.draft, run.prompt_set, run.temperature, run.method].append(run)
    plain = {_place(run): run.tokens_per_second for run in runs if run.method == "plain"}
    settings = dict.fromkeys(key[:4] for key in groups)
    methods = dict.fromkeys(run.method for run in runs)
    keys = [(*setting, method) for setting in settings for method in methods if (*setting, method) in groups]
    return [_row(key, groups[key], plain) for key in keys]


def _place(run: Run) -> tuple:
    return run.target, run.draft, run.prompt_set, run.prompt, run.temperature, run.repeat


def _row(key: Key, runs: list[Run], plain: dict[tuple, float]) -> Row:
    target, draft, prompt_set, temperature, method = key
    speed_ups = per_prompt(runs, lambda run: run.tokens_per_second / plain[_place(run)])
    speed_up = statistics.median(speed_ups)
    low, high = quartiles(speed_ups)
    forwards = sum(run.forwards - 1 for run in runs)
    tau = sum(run.new_tokens - 1 for run in runs) / forwards if forwards else None
    compared = [run for run in runs if run.same is not None]
    memory = [run.peak_memory for run in runs if run.peak_memory is not None]
    return Row(
        target=target,
        draft=draft,
        prompt_set=prompt_set,
        temperature=temperature,
        method=method,
        prompts=len({run.prompt for run in runs}),
        tokens_per_second=statistics.median(per_prompt(runs, lambda run: run.tokens_per_second)),
        speed_up=speed_up,
        speed_up_low=low,
        speed_up_high=high,
        tau=tau,
        efficiency=speed_up / tau if tau else None,
        compared=len(compared),
        same=sum(bool(run.same) for run in compared),
        near_ties=sum(bool(run.comparison and run.comparison["within_tolerance"]) for run in compared),
        peak_memory=max(memory, default=None),
        acceptance_by_position=acceptance_by_position(runs),
        time_shares=time_shares(runs),
    )


def per_prompt(runs: list[Run], figure) -> list[float]:
    """A figure of each prompt: the median of its repeats."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(figure(run))
    return [statistics.median(values) for values in by_prompt.values()]


def quartiles(values: list[float]) -> tuple[float, float]:
    """First and third quartile; the value itself where there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def acceptance_by_position(runs: Iterable[Run]) -> list[float]:
    """Entry i - 1: share of all rounds that accepted at least i candidates.

    Rounds with a shorter block at the end of a text count as not having accepted the positions they lack.
    """
    histograms = [run.statistics["histogram"] for run in runs if run.statistics]
    length = max((len(histogram) for histogram in histograms), default=0)
    counts = [sum(h[k] for h in histograms if k < len(h)) for k in range(length)]
    rounds = sum(counts)
    return [sum(counts[i:]) / rounds for i in range(1, length)] if rounds else []


def time_shares(runs: Iterable[Run]) -> dict[str, float]:
    """Share of the calls' time by phase, all runs together."""
    seconds = [run.statistics["seconds"] for run in runs if run.statistics]
    total = sum(each["total"] for each in seconds)
    return {phase: sum(each[phase] for each in seconds) / total for phase in (*PHASES, "rest")} if total else {}
