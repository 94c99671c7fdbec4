"""Make the tables of docs/quantized-targets.md and its Chinese twin, measuring first what is asked for.

    python scripts/make_quantized_table.py                       write the stored results into the pages
    python scripts/make_quantized_table.py --measure all         run the tiny targets of tests/ first
    python scripts/make_quantized_table.py --measure awq bnb-nf4

Results are stored in docs/data/quantized-targets.json, those of scripts/measure_quantized_pair.py beside it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
DATA = ROOT / "docs" / "data"
KINDS_FILE, PAIR_FILE = DATA / "quantized-targets.json", DATA / "quantized-smollm2.json"
PAGES = {"en": ROOT / "docs" / "quantized-targets.md", "zh": ROOT / "docs" / "quantized-targets.zh.md"}
#: Prompts per mode; AWQ, which must be exact in float32, gets three times as many.
PROMPTS = {"greedy": 4, "sampled": 2}
WORDS = {
    "en": {
        "kinds": [
            "Target",
            "dtype",
            "Texts equal to plain generate",
            "Differ within tolerance",
            "Largest margin (bound)",
        ],
        "pair": ["Target", "dtype", "Texts equal", "Differ within tolerance", "tau", "Speed-up"],
        "refused": "does not load",
    },
    "zh": {
        "kinds": ["目标模型", "dtype", "与普通 generate 相同的文本", "在舍入误差内分歧", "最大间隔（上界）"],
        "pair": ["目标模型", "dtype", "相同的文本", "在舍入误差内分歧", "tau", "相对普通解码的速度"],
        "refused": "无法加载",
    },
}


def measure(names: list[str]) -> None:
    """Run kinds, or all of them, and store a record per kind and dtype as soon as it is known."""
    import torch
    from quantized_targets import KINDS, REFUSED, load
    from quantized_targets import examine as examine_target
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name, kind in {**KINDS, **REFUSED}.items():
        if name not in names and names != ["all"]:
            continue
        for dtype in kind.dtypes:
            record: dict[str, Any] = {"title": kind.title, "packages": versions(kind.packages)}
            try:
                target = load(name, dtype)
                for mode, prompts in PROMPTS.items():
                    count = prompts * (3 if name.startswith("awq") else 1)
                    found = examine_target(target, count, mode, kind.prompt)
                    record[mode] = {
                        key: getattr(found, key) for key in ("texts", "same", "explained", "worst", "varied")
                    }
            except Exception as error:  # any package may refuse in any way; the table says how
                if name not in REFUSED:
                    raise
                record["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            store(KINDS_FILE, key, {**record, "torch": torch.__version__})
            print(key, record, flush=True)


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions of transformers and of the packages a kind needs."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("transformers", *packages):
        try:
            found[package] = version(package.replace(".", "-"))
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def store(path: Path, key: str, record: dict[str, Any]) -> None:
    """Add one record to a file of results."""
    records = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**records, key: record}, indent=1, ensure_ascii=False) + "\n")


def kinds_table(language: str) -> list[str]:
    """The rows of the tiny targets."""
    words = WORDS[language]
    rows = header(words["kinds"])
    for key, record in json.loads(KINDS_FILE.read_text()).items():
        cells = [record["title"], key.split()[1]]
        if "error" in record:
            cells += [f"{words['refused']}: {record['error']}", "", ""]
        else:
            modes = [record["greedy"], record["sampled"]]
            texts, same, differing = (sum(mode[name] for mode in modes) for name in ("texts", "same", "explained"))
            worst = max((mode["worst"] for mode in modes if mode["worst"]), default=None)
            cells += [f"{same} / {texts}", str(differing or ""), f"{worst[0]:.2g} ({worst[1]:.2g})" if worst else ""]
        rows.append(row(cells))
    return rows


def pair_table(language: str) -> list[str]:
    """The rows of SmolLM2 and its draft."""
    rows = header(WORDS[language]["pair"])
    for record in json.loads(PAIR_FILE.read_text()).values():
        texts = f"{record['same']} / {record['texts']}"
        cells = [record["title"], record["dtype"], texts, str(record["explained"] or "")]
        rows.append(row([*cells, f"{record['tau']:.2f}", f"{record['ratio']:.2f}"]))
    return rows


def header(words: list[str]) -> list[str]:
    return [row(words), row(["---"] * len(words))]


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def with_tables(page: str, language: str) -> str:
    """A page with its tables made from the stored results."""
    for name, make in (("kinds", kinds_table), ("pair", pair_table)):
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        head, rest = page.split(begin)
        page = "\n".join([head + begin, "", *make(language), "", end + rest.split(end, 1)[1]])
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="+", metavar="KIND", default=[], help="kinds to run first, or all")
    names = parser.parse_args().measure
    if names:
        measure(names)
    for language, path in PAGES.items():
        path.write_text(with_tables(path.read_text(), language))


if __name__ == "__main__":
    main()
