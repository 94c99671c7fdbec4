"""Put measured results into the pages that show them.

python docs/fill_results.py        writes README.md and docs/**/benchmarks.md anew from docs/results/*/results.json

Owns: the text between `<!-- results: begin -->` and `<!-- results: end -->`, in the language of the page. Numbers come
from the stored files alone; a test checks that the pages say what the files say.
"""

import re
from pathlib import Path

from hf_dflash.bench.report import Results, conditions_line, markdown_table

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", DOCS / "benchmarks.md", DOCS / "zh_cn" / "benchmarks.md"]
SECTION = re.compile(r"(<!-- results: begin -->\n).*?(<!-- results: end -->)", re.S)
NOT_MEASURED = "Not measured yet.\n"


def section(page: Path) -> str:
    """What stands between the marks of a page: for each stored result its title, conditions, table and plots."""
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


def filled(page: Path) -> str:
    """The page's text with its results section made anew."""
    return SECTION.sub(lambda match: match[1] + section(page) + match[2], page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(filled(each), encoding="utf-8")
