"""Benchmark results as files: the JSON file that holds everything, and the CSV file and Markdown table made from it."""

import csv
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hf_dflash.bench.runner import Run
from hf_dflash.bench.summary import Row, summarize
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.files import atomic_write, dump_json

RESULT_FILES = ("results.json", "results.csv", "table.md", "speed_up.png", "acceptance.png", "round.png")
GPU_CHECK_FILES = ("gpu-check.json", "gpu-check.md")
#: File -> fields by which it is recognized.
_FIELDS = {
    "results.json": {"conditions", "settings", "left_out", "runs"},
    "results.csv": {"target", "draft", "prompt_set", "method"},
    "gpu-check.json": {"conditions", "rows"},
}


@dataclass
class Results:
    """All results of a benchmark.

    Attributes:
        conditions: machine, versions, commit.
        settings: dtype, tokens per prompt, repeats and so on.
        left_out: methods or pairs that could not run or failed, with the reason.
        runs: all runs.
    """

    conditions: dict[str, Any]
    settings: dict[str, Any]
    left_out: dict[str, str]
    runs: list[Run]

    def write_json(self, path: Path) -> None:
        """Write everything atomically, one line per run; NaN and infinity become null."""
        values = asdict(self)
        runs = values.pop("runs")
        head = dump_json(values, indent=1, ensure_ascii=False).removesuffix("\n}")
        lines = ",\n".join(f"  {dump_json(run, ensure_ascii=False)}" for run in runs)
        atomic_write(path, f'{head},\n "runs": [\n{lines}\n ]\n}}\n')

    @classmethod
    def read_json(cls, path: Path) -> "Results":
        """Read what `write_json` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "runs": [Run(**run) for run in values["runs"]]})

    def rows(self) -> list[Row]:
        return summarize(self.runs)


def check_folder(folder: Path, names: tuple[str, ...]) -> None:
    """Check that files about to be replaced were written by an earlier benchmark.

    Args:
        folder: for the results.
        names: `RESULT_FILES` or `GPU_CHECK_FILES`.

    Raises:
        UnsupportedOptionError: the folder has such files, but nothing in them shows that `hf-dflash bench` wrote them.
    """
    present = [name for name in names if (folder / name).exists()]
    signs = [_is_ours(folder / name) for name in present]
    if present and (False in signs or True not in signs):
        raise UnsupportedOptionError(
            f"{folder} has {', '.join(present)}, which `hf-dflash bench` did not write. Choose another --out."
        )


def _is_ours(path: Path) -> bool | None:
    """Whether a file's fields are those that a benchmark writes; None for a file without fields."""
    if path.name not in _FIELDS:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text).keys() if path.suffix == ".json" else set(text.partition("\n")[0].strip().split(","))
    except (OSError, ValueError, AttributeError):
        return False
    return _FIELDS[path.name] <= found


def write_csv(rows: list[Row], path: Path) -> None:
    """Write one line per row, with lists and dicts as JSON."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([each.name for each in fields(Row)])
        for row in rows:
            values = asdict(row).values()
            writer.writerow([dump_json(value) if isinstance(value, (list, dict)) else value for value in values])


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
    processor = f"{conditions['processor']}, {conditions['threads']} threads"
    # Results of earlier versions do not name the device.
    device = results.settings.get("device") or ("cuda" if conditions["gpu"] else "cpu")
    hardware = processor if device == "cpu" else conditions["gpu"] or device
    versions = ", ".join(f"{name} {number}" for name, number in packages.items() if name in ("torch", "transformers"))
    settings = results.settings
    return (
        f"{hardware}; {settings['dtype']}; {settings['max_new_tokens']} new tokens per prompt, batch 1, "
        f"medians over prompts; {versions}; commit {conditions['commit']}, {conditions['time'][:10]}."
    )
