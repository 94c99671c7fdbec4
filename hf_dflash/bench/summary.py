"""Aggregate benchmark runs into rows: medians, quartiles, and the acceptance length over many prompts."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hf_dflash.bench.runner import Run
from hf_dflash.decoding.statistics import PHASES

Key = tuple[str, str, str, float, str]


@dataclass(frozen=True)
class Row:
    """One method on one prompt set at one temperature.

    Attributes:
        target, draft, prompt_set, temperature, method: what was run.
        prompts: number of distinct prompts.
        tokens_per_second: median over the prompts, each the median of its repeats.
        speed_up: median over the prompts of this method's tokens per second over plain's on the same prompt and repeat.
        speed_up_low, speed_up_high: its quartiles.
        tau: tokens after the prefill over forwards after it, summed over all runs.
        efficiency: speed_up / tau.
        compared, same, near_ties: number of runs compared with plain generate, of those with the same ids, and of those
            that differ within numerical tolerance.
        peak_memory: maximum over all runs, in bytes; None on the CPU.
        acceptance_by_position: fraction of rounds that accepted at least that many candidates; empty for methods
            without statistics.
        time_shares: fraction of the call's time by phase, including `rest`; empty for methods without statistics.
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
    """Return one row per target, draft, prompt set, temperature and method, each in order of first appearance."""
    groups: dict[Key, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.target, run.draft, run.prompt_set, run.temperature, run.method].append(run)
    plain = {_run_key(run): run.tokens_per_second for run in runs if run.method == "plain"}
    settings = dict.fromkeys(key[:4] for key in groups)
    methods = dict.fromkeys(run.method for run in runs)
    keys = [(*setting, method) for setting in settings for method in methods if (*setting, method) in groups]
    return [_row(key, groups[key], plain) for key in keys]


def _run_key(run: Run) -> tuple:
    return run.target, run.draft, run.prompt_set, run.prompt, run.temperature, run.repeat


def _row(key: Key, runs: list[Run], plain: dict[tuple, float]) -> Row:
    target, draft, prompt_set, temperature, method = key
    speed_ups = per_prompt(runs, lambda run: run.tokens_per_second / plain[_run_key(run)])
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


def per_prompt(runs: list[Run], metric: Callable[[Run], float]) -> list[float]:
    """Return a metric for each prompt: the median over its repeats."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(metric(run))
    return [statistics.median(values) for values in by_prompt.values()]


def quartiles(values: list[float]) -> tuple[float, float]:
    """Return the first and third quartile, or the value itself if there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def acceptance_by_position(runs: Iterable[Run]) -> list[float]:
    """Return in entry i - 1 the fraction of all rounds that accepted at least i candidates.

    In rounds with a shorter block at the end of a text, the missing positions count as not accepted.
    """
    histograms = [run.statistics["histogram"] for run in runs if run.statistics]
    length = max((len(histogram) for histogram in histograms), default=0)
    counts = [sum(h[k] for h in histograms if k < len(h)) for k in range(length)]
    rounds = sum(counts)
    return [sum(counts[i:]) / rounds for i in range(1, length)] if rounds else []


def time_shares(runs: Iterable[Run]) -> dict[str, float]:
    """Return the fraction of the calls' time by phase, summed over all runs."""
    seconds = [run.statistics["seconds"] for run in runs if run.statistics]
    total = sum(each["total"] for each in seconds)
    return {phase: sum(each[phase] for each in seconds) / total for phase in (*PHASES, "rest")} if total else {}
