"""Fill the marked sections of the documentation with tables made from stored results.

    python scripts/fill_results.py             rewrite README.md and docs/{results,exactness}{,.zh}.md
    python scripts/fill_results.py --check     only say which pages differ, exit code 1 if any does

A section is the text between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. NAME is `headline` (the README's three
rows), `bench` (`hf-dflash bench`), `contexts` (scripts/measure_contexts.py) or `proof` (measure_exactness.py).
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

from hf_dflash.bench.report import Results, conditions_line, markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
NAMES = ("results.md", "results.zh.md", "exactness.md", "exactness.zh.md")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in NAMES)]
SECTION = re.compile(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", re.S)
PLOTS = {"speed_up": "Speed-up by method", "acceptance": "Acceptance by position", "round": "Time by phase"}


def stored_benchmarks() -> list[Path]:
    """The results of `hf-dflash bench`, a folder each."""
    return sorted(RESULTS.glob("*/results.json"))


def bench_section() -> str:
    """For each stored benchmark its title, conditions, table and plots."""
    parts = []
    for stored in stored_benchmarks():
        results = Results.read_json(stored)
        title = (stored.parent / "title.txt").read_text(encoding="utf-8").strip()
        parts.append(f"**{title}** {conditions_line(results)}\n\n{markdown_table(results.rows())}")
        pictures = [(words, stored.parent / f"{name}.png") for name, words in PLOTS.items()]
        parts += [
            f"![{words}](results/{file.relative_to(RESULTS).as_posix()})\n" for words, file in pictures if file.exists()
        ]
    return "\n".join(parts)


def headline_section() -> str:
    """Three rows for the README: greedy decoding of both prompt sets, and the longest context."""
    names = {"humaneval": "{} HumanEval problems", "chat": "{} everyday questions"}
    lines = ["| | tokens per target forward (tau) | speed-up | authors' loop |", "|---|---|---|---|"]
    rows = [row for stored in stored_benchmarks() for row in Results.read_json(stored).rows() if row.temperature == 0]
    for prompt_set, words in names.items():
        ours, authors = (
            next(row for row in rows if row.prompt_set == prompt_set and row.method == method)
            for method in ("dflash", "authors")
        )
        cells = [words.format(ours.prompts), f"{ours.tau:.2f}", f"**{ours.speed_up:.2f}**", f"{authors.speed_up:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    contexts = json.loads((RESULTS / "contexts.json").read_text(encoding="utf-8"))["contexts"]
    longest = max(contexts, key=int)
    table = contexts[longest]["table"]
    cells = [
        f"a chat of {int(longest):,} tokens, after the prefill",
        f"{table['dflash']['tau']:.2f}",
        f"**{table['dflash']['speed_up']['median']:.2f}**",
        f"{table['authors']['speed_up']['median']:.2f}",
    ]
    return "\n".join([*lines, f"| {' | '.join(cells)} |", ""])


def contexts_section() -> str:
    """A row per context length and method: the cost of a round, and the speed after the prefill relative to plain
    generate.
    """
    stored = json.loads((RESULTS / "contexts.json").read_text(encoding="utf-8"))
    lines = ["| context | method | ms per round | speed-up | tau | speed-up / tau |", "|---|---|---|---|---|---|"]
    for length, context in stored["contexts"].items():
        for method, row in context["table"].items():
            cost, speed_up = row["round_ms"], row["speed_up"]
            lines.append(
                f"| {length} | {method} | {cost['median']:.0f} ({cost['min']:.0f} to {cost['max']:.0f}) "
                f"| {speed_up['median']:.2f} ({speed_up['min']:.2f} to {speed_up['max']:.2f}) "
                f"| {row['tau']:.2f} | {speed_up['median'] / row['tau']:.2f} |"
            )
    return "\n".join([*lines, ""])


def proof_section() -> str:
    """A row per dtype: prompts, equal texts, widest margin of a first difference, tau, rounds equal to the authors'."""
    lines = [
        "| dtype | prompts | tokens | equal texts | widest margin, ULPs | tau | same rounds as the authors' loop |",
        "|---|---|---|---|---|---|---|",
    ]
    for stored in sorted((RESULTS / "proof").glob("*.jsonl"), reverse=True):
        runs = [json.loads(line) for line in stored.read_text(encoding="utf-8").splitlines()]
        margins = [
            (run["best"] - run["second"]) / ulp_at(run["best"], run["dtype"]) for run in runs if not run["equal"]
        ]
        with_authors = [run for run in runs if "authors_committed" in run]
        same = sum(run["authors_committed"] == run["committed"] for run in with_authors)
        tau = sum(sum(run["committed"]) for run in runs) / sum(len(run["committed"]) for run in runs)
        lines.append(
            f"| {stored.stem} | {len(runs)} | {sum(run['new_tokens'] for run in runs)} "
            f"| {sum(run['equal'] for run in runs)} | {f'{max(margins):.1f}' if margins else '-'} | {tau:.3f} "
            f"| {f'{same} of {len(with_authors)}' if with_authors else '-'} |"
        )
    return "\n".join([*lines, ""])


def ulp_at(value: float, dtype: str) -> float:
    """The unit in the last place (ULP) at a value: bfloat16 has 8 significant bits, float32 24."""
    bits = {"bfloat16": 8, "float32": 24}[dtype]
    return 2.0 ** (math.floor(math.log2(abs(value))) + 1 - bits)


MAKERS = {"headline": headline_section, "bench": bench_section, "contexts": contexts_section, "proof": proof_section}


def filled(page: Path) -> str:
    """The page's text with its sections made from the stored results."""
    text = page.read_text(encoding="utf-8")
    return SECTION.sub(lambda match: match[1] + MAKERS[match[2]]() + match[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    check = parser.parse_args().check
    stale = {page: text for page in PAGES if (text := filled(page)) != page.read_text(encoding="utf-8")}
    for page, text in stale.items():
        print(f"{page.relative_to(ROOT)} {'differs from' if check else 'is filled with'} the stored results")
        if not check:
            page.write_text(text, encoding="utf-8")
    if check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
