"""Benchmark results as files: the JSON file that holds everything, and the CSV file and Markdown table made from it."""

import csv
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hf_dflash.bench.runner import Run
from hf_dflash.bench.summary import Row, summarize
from hf_dflash.files import atomic_write


@dataclass
class Results:
    """All results of a benchmark.

    Attributes:
        conditions: machine, versions, commit.
        settings: dtype, tokens per prompt, repeats and so on.
        left_out: methods or pairs that did not run, with the reason.
        runs: all runs.
    """

    conditions: dict[str, Any]
    settings: dict[str, Any]
    left_out: dict[str, str]
    runs: list[Run]

    def write_json(self, path: Path) -> None:
        """Write everything atomically, one line per run; NaN and infinity become null."""
        values = without_nan(asdict(self))
        runs = values.pop("runs")
        head = json.dumps(values, indent=1, ensure_ascii=False).removesuffix("\n}")
        lines = ",\n".join(f"  {json.dumps(run, ensure_ascii=False)}" for run in runs)
        atomic_write(path, f'{head},\n "runs": [\n{lines}\n ]\n}}\n')

    @classmethod
    def read_json(cls, path: Path) -> "Results":
        """Read what `write_json` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "runs": [Run(**run) for run in values["runs"]]})

    def rows(self) -> list[Row]:
        return summarize(self.runs)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return value


def write_csv(rows: list[Row], path: Path) -> None:
    """Write one line per row, with lists and dicts as JSON."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([each.name for each in fields(Row)])
        for row in rows:
            values = asdict(row).values()
            writer.writerow([json.dumps(value) if isinstance(value, (list, dict)) else value for value in values])


def markdown_table(rows: list[Row]) -> str:
    """Format the rows as a Markdown table, naming the pair only if there are several."""
    several = len({(row.target, row.draft) for row in rows}) > 1
    head = ["pair"] * several + ["prompts", "T", "method", "tokens/s", "speed-up (quartiles)", "tau", "speed-up / tau"]
    lines = [[*head, "same ids as plain"]]
    for row in rows:
        pair = [f"{Path(row.target).name}, {Path(row.draft).name}"] * several
        lines.append([*pair, *_cells(row)])
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def _cells(row: Row) -> list[str]:
    plain = row.method == "plain"
    return [
        f"{row.prompts} {row.prompt_set}",
        f"{row.temperature:g}",
        row.method,
        f"{row.tokens_per_second:.1f}",
        "1" if plain else f"{row.speed_up:.2f} ({row.speed_up_low:.2f} to {row.speed_up_high:.2f})",
        "-" if row.tau is None else f"{row.tau:.2f}",
        "-" if row.efficiency is None or plain else f"{row.efficiency:.2f}",
        _agreement(row),
    ]


def _agreement(row: Row) -> str:
    if not row.compared:
        return "-"
    ties = f", {row.near_ties} differ within numerical tolerance" if row.near_ties else ""
    return f"{row.same} of {row.compared}{ties}"


def conditions_line(results: Results) -> str:
    """Describe hardware, settings and versions in one sentence."""
    conditions, packages = results.conditions, results.conditions["packages"]
    hardware = conditions["gpu"] or f"{conditions['processor']}, {conditions['threads']} threads"
    versions = ", ".join(f"{name} {number}" for name, number in packages.items() if name in ("torch", "transformers"))
    settings = results.settings
    return (
        f"{hardware}; {settings['dtype']}; {settings['max_new_tokens']} new tokens per prompt, batch 1, "
        f"medians over prompts; {versions}; commit {conditions['commit']}, {conditions['time'][:10]}."
    )
