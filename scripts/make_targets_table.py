"""Make the tables of docs/targets.md and its Chinese twin from the results of the exactness tests.

    python -m pytest tests/test_lossless.py tests/test_lossless_recurrent.py tests/test_multimodal.py \
        tests/test_rollback.py --junitxml=newest.xml
    python scripts/make_targets_table.py 5.17.0=floor.xml 5.24.0=newest.xml

Run the tests once per transformers version and name the files; a version may be given several times. Without arguments
the pages are rewritten from docs/data/targets.json, which keeps what the tables need.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import FAMILIES, MULTIMODAL_FAMILIES  # noqa: E402

STORE = ROOT / "docs" / "data" / "targets.json"
SECTION = re.compile(r"(<!-- tables: begin -->\n).*?(<!-- tables: end -->)", re.S)
ALL = {**FAMILIES, **MULTIMODAL_FAMILIES}
STATES = {"keys", "values", "conv_states", "recurrent_states"}
WORDS = {
    "en": {
        "page": ROOT / "docs" / "targets.md",
        "head": ["Target", "Layers"],
        "exact": "exact ({passed} tests)",
        "refused": "refused ({letter})",
        "failed": "{failed} of {passed} tests fail",
        "reasons": "Why:",
        "states": "Largest absolute difference of two caches after one text with different rejected tokens (float32):",
        "state_head": ["State", "Families"],
    },
    "zh": {
        "page": ROOT / "docs" / "targets.zh.md",
        "head": ["目标模型", "层"],
        "exact": "精确（{passed} 项测试）",
        "refused": "拒绝（{letter}）",
        "failed": "{passed} 项测试中 {failed} 项失败",
        "reasons": "原因（错误信息原文）：",
        "states": "两个缓存读入同一文本、但被拒绝的词元不同时，各状态的最大绝对差（float32）：",
        "state_head": ["状态", "模型族数"],
    },
}


def read_results(path: Path, families: dict[str, dict]) -> None:
    """Add to each family: tests passed and failed, the message of a refusal, the largest differences of states."""
    for case in ElementTree.parse(path).iter("testcase"):
        parameters = re.findall(r"\[(.*)\]", case.get("name"))
        name = next((part for part in "".join(parameters).split("-") if part in ALL), None)
        if name is None or case.find("skipped") is not None or "negative" in case.get("name"):
            continue
        family = families.setdefault(name, {"passed": 0, "failed": 0, "refused": None, "differences": {}})
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        if case.find("failure") is not None or case.find("error") is not None:
            family["failed"] += 1
        elif "refused" in properties:
            family["refused"] = properties["refused"]
        else:
            family["passed"] += 1
        for kind in STATES & set(properties):
            family["differences"][kind] = max(family["differences"].get(kind, 0.0), float(properties[kind]))


def tables(results: dict[str, dict], words: dict) -> str:
    """The text of the section."""
    versions = list(results)
    reasons: dict[str, str] = {}
    lines = ["| " + " | ".join([*words["head"], *(f"transformers {version}" for version in versions)]) + " |"]
    lines.append("|" + "---|" * (2 + len(versions)))
    for name, family in ALL.items():
        cells = [verdict(results[version].get(name), reasons, words) for version in versions]
        lines.append(f"| `{family.model_class}` | {', '.join(family.kinds)} | {' | '.join(cells)} |")
    lines += ["", words["reasons"], ""]
    lines += [f"- ({letter}) {reason}" for reason, letter in reasons.items()]
    lines += ["", words["states"], ""]
    lines.append("| " + " | ".join([*words["state_head"], *versions]) + " |")
    lines.append("|" + "---|" * (2 + len(versions)))
    for kind in sorted(STATES):
        found = [[f["differences"][kind] for f in results[v].values() if kind in f["differences"]] for v in versions]
        if all(found):
            lines.append(f"| `{kind}` | {len(found[-1])} | {' | '.join(f'{max(values):.1e}' for values in found)} |")
    return "\n".join(lines) + "\n"


def verdict(family: dict | None, reasons: dict[str, str], words: dict) -> str:
    """One cell: exact, refused or failing."""
    if family is None:
        return "-"
    letter = ""
    if family["refused"]:
        letter = reasons.setdefault(family["refused"], chr(ord("a") + len(reasons)))
    if family["failed"]:
        template = words["failed"]
    elif letter:
        template = words["refused"]
    else:
        template = words["exact"]
    return template.format(passed=family["passed"], failed=family["failed"], letter=letter)


def filled(language: str) -> str:
    """A page's text with its tables made from the stored results."""
    words = WORDS[language]
    results = json.loads(STORE.read_text(encoding="utf-8"))
    text = words["page"].read_text(encoding="utf-8")
    return SECTION.sub(lambda match: match[1] + tables(results, words) + match[2], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", metavar="VERSION=FILE", help="a JUnit file per transformers version")
    results: dict[str, dict] = {}
    for argument in parser.parse_args().results:
        version, path = argument.split("=", 1)
        read_results(Path(path), results.setdefault(version, {}))
    if results:
        STORE.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for language, words in WORDS.items():
        words["page"].write_text(filled(language), encoding="utf-8")


if __name__ == "__main__":
    main()
