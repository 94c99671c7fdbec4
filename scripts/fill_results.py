"""Put measured results into the pages that show them.

python docs/fill_results.py        writes README.md and docs/**/{benchmarks,exactness}.md anew from docs/results

Owns: the text between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, where NAME is `results` (`hf-dflash bench`),
`contexts` (scripts/measure_contexts.py) or `proof` (scripts/prove_pair.py). Numbers come from the stored files alone; a
test checks that the pages say what the files say.
"""

import json
import math
import re
from pathlib import Path

from hf_dflash.bench.report import Results, conditions_line, markdown_table

DOCS = Path(__file__).parent
TRANSLATED = [folder / name for folder in (DOCS, DOCS / "zh_cn") for name in ("benchmarks.md", "exactness.md")]
PAGES = [DOCS.parent / "README.md", *TRANSLATED]
SECTION = re.compile(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", re.S)
NOT_MEASURED = "Not measured yet.\n"


def bench_section(page: Path) -> str:
    """For each stored result of `hf-dflash bench` its title, conditions, table and plots."""
    parts = []
    for stored in sorted(DOCS.glob("results/*/results.json")):
        results = Results.read_json(stored)
        title = (stored.parent / "title.txt").read_text(encoding="utf-8").strip()
        parts.append(f"**{title}** {conditions_line(results)}\n\n{markdown_table(results.rows())}")
        up = "../" * (len(page.parent.relative_to(DOCS).parts) if page.is_relative_to(DOCS) else 0)
        root = up if page.is_relative_to(DOCS) else "docs/"
        names = {"speed_up": "Speed-up by method", "acceptance": "Acceptance by position", "round": "Time by phase"}
        shown = names if page.is_relative_to(DOCS) else {"speed_up": names["speed_up"]}
        pictures = [(words, stored.parent / f"{name}.png") for name, words in shown.items()]
        parts += [
            f"![{words}]({root}{file.relative_to(DOCS).as_posix()})\n" for words, file in pictures if file.exists()
        ]
    return "\n".join(parts) or NOT_MEASURED


def contexts_section(page: Path) -> str:
    """A row per context length and method: the cost of a round, and the speed behind the prefill over plain
    generate's.
    """
    stored = json.loads((DOCS / "results" / "contexts.json").read_text(encoding="utf-8"))
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


def proof_section(page: Path) -> str:
    """A row per dtype: prompts, equal texts, the widest margin of a first difference, tau, rounds like the authors'."""
    lines = [
        "| dtype | prompts | tokens | equal | widest margin, rounding steps | tau | rounds as the authors' |",
        "|---|---|---|---|---|---|---|",
    ]
    for stored in sorted((DOCS / "results" / "proof").glob("*.jsonl"), reverse=True):
        runs = [json.loads(line) for line in stored.read_text(encoding="utf-8").splitlines()]
        margins = [
            (run["best"] - run["second"]) / step_at(run["best"], run["dtype"]) for run in runs if not run["equal"]
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


def step_at(value: float, dtype: str) -> float:
    """The distance between neighboring numbers of a dtype at a value: bfloat16 has 8 significant bits, float32 24."""
    bits = {"bfloat16": 8, "float32": 24}[dtype]
    return 2.0 ** (math.floor(math.log2(abs(value))) + 1 - bits)


MAKERS = {"results": bench_section, "contexts": contexts_section, "proof": proof_section}


def filled(page: Path) -> str:
    """The page's text with its marked sections made anew."""
    text = page.read_text(encoding="utf-8")
    return SECTION.sub(lambda match: match[1] + MAKERS[match[2]](page) + match[3], text)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(filled(each), encoding="utf-8")
