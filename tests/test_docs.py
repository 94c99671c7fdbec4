"""The documentation: twins in both languages, links, the built site, and code that runs.

A fenced block after `<!-- not run: why -->` is skipped; every other `python` and `bash` block must run. Models that are
too large for this machine are replaced by the SmolLM2 pair, and long answers by short ones.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if not path.name.endswith(".zh.md"))
FENCE = re.compile(r"(?P<comment><!-- not run: [^\n]+ -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<address>[^)\s]+)\)")


class Block(NamedTuple):
    language: str
    code: str
    runs: bool


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["language"], match["code"], match["comment"] is None) for match in found]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def twin(name: str) -> Path:
    """The Chinese page of an English one: `docs/targets.zh.md` for `targets.md`."""
    return DOCS / name.replace(".md", ".zh.md")


def headings(text: str) -> list[int]:
    return [len(match[1]) for match in re.finditer(r"^(#+) ", text, re.M)]


def test_every_page_has_its_twin():
    assert PAGES
    assert sorted(path.name.replace(".zh.md", ".md") for path in DOCS.glob("*.zh.md")) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_twins_have_the_same_code_and_the_same_sections(name):
    english, chinese = DOCS / name, twin(name)
    assert blocks(english) == blocks(chinese)
    assert headings(prose(english)) == headings(prose(chinese))


@pytest.mark.parametrize("name", PAGES)
def test_the_twin_is_chinese(name):
    text = prose(twin(name))
    assert re.search("[\u4e00-\u9fff]", text)
    assert not re.search("[\u4e00-\u9fff]", prose(DOCS / name))


def every_page() -> list[Path]:
    others = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "scripts/README.md", "examples/smollm2_draft/README.md")
    return [*(ROOT / name for name in others), *DOCS.glob("*.md")]


@pytest.mark.parametrize("page", every_page(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    local = [match["address"] for match in LINK.finditer(prose(page)) if ":" not in match["address"].split("/")[0]]
    files = [address.partition("#")[0] for address in local if not address.startswith("#")]
    assert [file for file in files if not (page.parent / file).exists()] == []


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for language in ("", "zh"):
        page = (tmp_path / "site" / language / "api" / "index.html").read_text(encoding="utf-8")
        assert "a DFlash draft from a folder or the Hub" in page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert any("acceptance" in text for place, text in texts.items() if not place.startswith("zh/"))
    # Chinese has no spaces: jieba marks the words, with zero-width spaces, so that they can be found.
    assert any("\u200b" in text for place, text in texts.items() if place.startswith("zh/"))


def test_results_are_the_stored_ones():
    command = [sys.executable, ROOT / "scripts/fill_results.py", "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_has_a_line_and_shows_its_help():
    """One shape for all of them: what it does, its options, and no work on import."""
    listed = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "scripts/README.md").read_text(encoding="utf-8"), re.M)
    assert listed == sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
    for name in listed:
        tree = ast.parse((ROOT / "scripts" / name).read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), name
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), name
        assert "argparse" in {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}


def runnable() -> list:
    pages = [ROOT / "README.md", *(DOCS / name for name in PAGES)]
    found = [(page, number, block) for page in pages for number, block in enumerate(blocks(page), 1) if block.runs]
    found = [each for each in found if each[2].language in ("python", "bash")]
    return [pytest.param(block, id=f"{page.stem}-{number}") for page, number, block in found]


def replace_models(code: str, target: str, draft: str) -> str:
    """The code with the pair of this machine and short answers."""
    code = code.replace("z-lab/Qwen3-8B-DFlash-b16", draft).replace("Qwen/Qwen3-8B", target)
    code = code.replace("max_new_tokens=256", "max_new_tokens=12").replace(
        '"max_new_tokens": 256', '"max_new_tokens": 12'
    )
    return code.replace("-n 256", "-n 12")


@pytest.mark.slow
@pytest.mark.parametrize("block", runnable())
def test_code_runs(block, smollm2, tmp_path):
    code = replace_models(block.code, smollm2.target, smollm2.draft)
    if block.language == "bash":
        command = f"{shlex.quote(sys.executable)} -m hf_dflash"
        code = "set -e\n" + re.sub(r"\bhf-dflash\b", command, code)
        arguments = ["bash", "-c", code]
    else:
        arguments = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
