"""Plots of benchmark results: speed-up by method, acceptance by position, time of a round by phase."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_dflash.bench.summary import Row
from hf_dflash.decoding.statistics import PHASES
from hf_dflash.draft.errors import MissingPackageError

WIDTH, HEIGHT = 8.0, 4.5


def draw_all(rows: list[Row], folder: Path) -> list[Path]:
    """Draw every plot that the rows have data for and return the paths.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackageError('Plots need matplotlib: pip install "hf-dflash[bench]".') from error
    matplotlib.use("Agg")
    written = []
    if any(row.method != "plain" for row in rows):
        written.append(_draw(folder / "speed_up.png", rows, _speed_up))
    own = [row for row in rows if row.acceptance_by_position]
    if own:
        written.append(_draw(folder / "acceptance.png", own, _acceptance))
        written.append(_draw(folder / "round.png", own, _round))
    return written


def _draw(path: Path, rows: list[Row], fill: Callable[[Any, list[Row]], None]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    fill(axes, rows)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _label(row: Row, rows: list[Row]) -> str:
    """Return a label for the row's setting: prompts and temperature, and the pair if there are several."""
    parts = [f"{row.prompt_set}, T = {row.temperature:g}"]
    if len({(each.target, each.draft) for each in rows}) > 1:
        parts.insert(0, f"{Path(row.target).name} + {Path(row.draft).name}")
    return "\n".join(parts)


def _speed_up(axes: Any, rows: list[Row]) -> None:
    """Draw grouped bars: one group per setting, one bar per method, whiskers at the quartiles."""
    settings = list(dict.fromkeys(_label(row, rows) for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows if row.method != "plain"))
    width = 0.8 / max(len(methods), 1)
    for number, method in enumerate(methods):
        chosen = [row for row in rows if row.method == method]
        places = [settings.index(_label(row, rows)) + (number - (len(methods) - 1) / 2) * width for row in chosen]
        whiskers = [
            [row.speed_up - row.speed_up_low for row in chosen],
            [row.speed_up_high - row.speed_up for row in chosen],
        ]
        heights = [row.speed_up for row in chosen]
        axes.bar(places, heights, width * 0.92, yerr=whiskers, label=method, error_kw={"elinewidth": 1, "alpha": 0.6})
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(settings)), settings)
    axes.set_ylabel("speed-up over plain generate (median)")
    axes.legend(frameon=False, ncols=min(len(methods), 4), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _acceptance(axes: Any, rows: list[Row]) -> None:
    """Draw a line per setting, for its longest block: fraction of rounds that accepted at least k candidates."""
    longest: dict[str, Row] = {}
    for row in rows:
        best = longest.get(_label(row, rows))
        if best is None or len(row.acceptance_by_position) > len(best.acceptance_by_position):
            longest[_label(row, rows)] = row
    for row in longest.values():
        positions = range(1, len(row.acceptance_by_position) + 1)
        label = f"{row.method}, {_label(row, rows)}".replace("\n", ", ")
        axes.plot(positions, row.acceptance_by_position, marker="o", markersize=4, label=label)
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the block")
    axes.set_ylabel("fraction of rounds accepted up to here")
    axes.legend(frameon=False, fontsize="small")


def _round(axes: Any, rows: list[Row]) -> None:
    """Draw a stacked bar per row: the call's time by phase."""
    labels = [f"{row.method}\n{_label(row, rows)}" for row in rows]
    left = [0.0] * len(rows)
    for phase in (*PHASES, "rest"):
        shares = [100 * row.time_shares.get(phase, 0.0) for row in rows]
        axes.barh(labels, shares, left=left, label=phase)
        left = [sum(pair) for pair in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the call's time")
    axes.legend(frameon=False, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
