"""The levels of DESIGN.md, read from the source without running it.

A file imports only from its own level or below; optional packages are imported inside the function that needs them; the
files that travel to the Hub import only their siblings, torch and transformers.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_dflash"

LEVELS = {
    "errors": 0,
    "files": 0,
    "version": 0,
    "configuration_dflash": 1,
    "acceptance": 1,
    "masking_dflash": 1,
    "modeling_dflash": 2,
    "layouts": 2,
    "cache": 2,
    "block_attention": 2,
    "target": 3,
    "processes": 3,
    "loading": 3,
    "continuation": 4,
    "drafting": 4,
    "options": 4,
    "rows": 4,
    "outputs": 4,
    "decoding": 5,
    "generation": 6,
    "dispatch": 6,
    "comparison": 7,
    "hub": 7,
    "inspection": 7,
    "bench": 7,
    "training": 7,
    "cli": 8,
    "__init__": 8,
    "__main__": 8,
}
HUB_FILES = {"errors", "configuration_dflash", "masking_dflash", "modeling_dflash"}
ALWAYS_THERE = {"torch", "transformers"}
BROUGHT_BY_TRANSFORMERS = {"huggingface_hub", "numpy", "safetensors", "tokenizers", "tqdm"}
BROUGHT_FOR_THE_COMMAND_LINE = {"rich", "typer"}


class Import(NamedTuple):
    line: int
    name: str  # absolute and dotted, as far as the statement says: "torch.nn", "hf_dflash.cache.TargetCache"
    relative: bool
    at_import: bool  # False inside a function


def room_of(path: Path) -> str:
    """The room of DESIGN.md that a source file belongs to: `hf_dflash/cache/attention.py` is in `cache`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def statements(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements that can run, each with whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_import
        elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        else:
            inside_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from statements(child, at_import and not inside_function)


def imports_of(path: Path, source: str) -> Iterator[Import]:
    for node, at_import in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, False, at_import)
            continue
        base = [node.module] if node.module else []
        if node.level:
            # `from ..errors import X` in hf_dflash/cache/full.py: level 2 cuts one folder from (hf_dflash, cache).
            folders = ["hf_dflash", *path.relative_to(PACKAGE).parts[:-1]]
            base = folders[: len(folders) - node.level + 1] + base
        for alias in node.names:
            yield Import(node.lineno, ".".join([*base, alias.name]), bool(node.level), at_import)


def complaint(room: str, found: Import) -> str | None:
    """What is wrong with one import in a file of `room`; None when it is as it should be."""
    top, *rest = found.name.split(".")
    if top == "hf_dflash":
        source = rest[0] if rest and rest[0] in LEVELS else "__init__"
        if LEVELS[source] > LEVELS[room]:
            return f"level {LEVELS[room]} ({room}) imports from level {LEVELS[source]} ({source})"
        if room in HUB_FILES and not found.relative:
            return "a Hub file names hf_dflash, which is not there on the Hub"
        return None
    if top in sys.stdlib_module_names or top in ALWAYS_THERE:
        return None
    if room in HUB_FILES:
        return f"a Hub file imports {top}"
    if top in BROUGHT_BY_TRANSFORMERS or (room == "cli" and top in BROUGHT_FOR_THE_COMMAND_LINE):
        return None
    return f"{top} is imported outside the function that needs it" if found.at_import else None


def complaints(path: Path, source: str) -> list[str]:
    room = room_of(path)
    if room not in LEVELS:
        return [f"{path.relative_to(PACKAGE)}: no level is known for '{room}'"]
    said = [(found.line, complaint(room, found)) for found in imports_of(path, source)]
    return [f"{path.relative_to(PACKAGE)}:{line}: {text}" for line, text in said if text]


def test_every_file_keeps_to_its_level():
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    assert [text for path in files for text in complaints(path, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("acceptance.py", "from hf_dflash.decoding import decode", "imports from level 5"),
        ("cache/full.py", "from ..target import Target", "imports from level 3"),
        ("loading.py", "def f():\n    import hf_dflash", "imports from level 8"),
        ("target.py", "import accelerate", "outside the function"),
        ("target.py", "try:\n    import peft\nexcept ImportError:\n    peft = None", "outside the function"),
        ("target.py", "class A:\n    import rich", "outside the function"),
        ("modeling_dflash.py", "from hf_dflash.errors import DFlashError", "names hf_dflash"),
        ("modeling_dflash.py", "def f():\n    import safetensors", "a Hub file imports safetensors"),
        ("configuration_dflash.py", "from .modeling_dflash import DFlashDraftModel", "imports from level 2"),
        ("helpers.py", "", "no level is known"),
    ],
)
def test_a_violation_is_seen(file, source, expected):
    (said,) = complaints(PACKAGE / file, source)
    assert expected in said


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "modeling_dflash.py",
            "from .errors import DFlashError\nimport torch.nn as nn\nfrom transformers import PreTrainedModel",
        ),
        ("hub.py", "def f():\n    import accelerate"),
        ("cli/bench.py", "import typer\nfrom hf_dflash.bench import run"),
        ("target.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import peft"),
    ],
)
def test_what_is_allowed_passes(file, source):
    assert complaints(PACKAGE / file, source) == []
