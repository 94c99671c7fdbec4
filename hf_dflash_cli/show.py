"""What metrics look like on a terminal: a call's table, bars of acceptance by position, a comparison in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hf_dflash.decoding.comparison import Comparison
    from hf_dflash.decoding.statistics import DFlashStatistics

BAR_WIDTH = 30


def diagnostics() -> Console:
    """The console for everything that is not the answer: standard error, so that the answer can be piped."""
    return Console(stderr=True, highlight=False)


def two_columns() -> Table:
    return Table(show_header=False, box=None, padding=(0, 2, 0, 0))


def statistics_table(statistics: DFlashStatistics) -> Table:
    """Tokens, rates and times of one call."""
    table = two_columns()
    per_second = statistics.new_tokens / statistics.total_seconds if statistics.total_seconds else float("nan")
    table.add_row("tokens", f"{statistics.new_tokens} in {statistics.total_seconds:.2f} s, {per_second:.1f} tokens/s")
    if statistics.rounds:
        table.add_row("rounds", f"{statistics.rounds}, {statistics.tau:.2f} tokens each (acceptance length tau)")
        phases = {**statistics.seconds, "rest": statistics.rest_seconds}
        table.add_row("time", ", ".join(f"{name} {_share(value, statistics)}" for name, value in phases.items()))
        table.add_row("accepted", acceptance_bars(statistics.acceptance_by_position))
    return table


def _share(seconds: float, statistics: DFlashStatistics) -> str:
    return f"{100 * seconds / statistics.total_seconds:.0f} %"


def acceptance_bars(shares: list[float]) -> Table:
    """A bar per block position: the percentage of rounds in which all candidates up to it were accepted.

    Args:
        shares: entry i - 1 is the share for position i, between 0 and 1.
    """
    table = two_columns()
    for position, share in enumerate(shares, start=1):
        full = round(share * BAR_WIDTH)
        bar = Text("█" * full, style="green") + Text("░" * (BAR_WIDTH - full), style="dim")
        table.add_row(f"position {position}", bar, f"{100 * share:3.0f} %")
    return table


def comparison_words(comparison: Comparison) -> str:
    """Whether two texts are the same; if not, where they first differ and whether numerical tolerance explains it."""
    if comparison.same:
        return f"yes, all {comparison.length} tokens"
    where = f"no, they differ from token {comparison.first_difference + 1} of {comparison.length}"
    if comparison.margin is None:
        return where
    reason = "within" if comparison.within_tolerance else "NOT within"
    margin = f"the target's top two logits are {comparison.margin:.3g} apart there"
    tolerance = f"the numerical tolerance of its {comparison.dtype} kernels ({comparison.bound:.3g})"
    return f"{where}: {margin}, {reason} {tolerance}"
