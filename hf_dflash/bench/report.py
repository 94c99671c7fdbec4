"""Results as files.

Owns: the JSON file that keeps everything, and the CSV file and the Markdown table made from it. Does not know: how
anything was measured, what plots look like.
"""

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
    """Everything about one benchmark.

    Attributes:
        conditions: machine, versions, commit.
        settings: dtype, tokens per prompt, repeats and so on.
        left_out: why methods or pairs did not run.
        runs: every run.
    """

    conditions: dict[str, Any]
    settings: dict[str, Any]
    left_out: dict[str, str]
    runs: list[Run]

    def write_json(self, path: Path) -> None:
        """Write all of it, a line per run, or leave the file as it was; figures that are no number become null."""
        known = without_nan(asdict(self))
        runs = known.pop("runs")
        head = json.dumps(known, indent=1, ensure_ascii=False).removesuffix("\n}")
        lines = ",\n".join(f"  {json.dumps(run, ensure_ascii=False)}" for run in runs)
        atomic_write(path, f'{head},\n "runs": [\n{lines}\n ]\n}}\n')

    @classmethod
    def read_json(cls, path: Path) -> "Results":
        """Read what `write_json` wrote."""
        known = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**known, "runs": [Run(**run) for run in known["runs"]]})

    def rows(self) -> list[Row]:
        return summarize(self.runs)


def without_nan(value: Any) -> Any:
    """The same with None in place of each NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return value


def write_csv(rows: list[Row], path: Path) -> None:
    """One line per row; lists and tables within a row as JSON."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([each.name for each in fields(Row)])
        for row in rows:
            values = asdict(row).values()
            writer.writerow([json.dumps(value) if isinstance(value, (list, dict)) else value for value in values])


def markdown_table(rows: list[Row]) -> str:
    """The rows as a table; pairs are named only if there are several."""
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
        _sameness(row),
    ]


def _sameness(row: Row) -> str:
    if not row.compared:
        return "-"
    ties = f", {row.near_ties} part within rounding" if row.near_ties else ""
    return f"{row.same} of {row.compared}{ties}"


def conditions_line(results: Results) -> str:
    """Where and with what it was measured, in one sentence for a reader."""
    known, packages = results.conditions, results.conditions["packages"]
    where = known["gpu"] or f"{known['processor']}, {known['threads']} threads"
    versions = ", ".join(f"{name} {number}" for name, number in packages.items() if name in ("torch", "transformers"))
    settings = results.settings
    return (
        f"{where}; {settings['dtype']}; {settings['max_new_tokens']} new tokens per prompt, batch 1, "
        f"medians over prompts; {versions}; commit {known['commit']}, {known['time'][:10]}."
    )
