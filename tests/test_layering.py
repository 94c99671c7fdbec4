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

ROOT = Path(__file__).parent.parent
PACKAGES = ("hf_dflash", "hf_dflash_cli")

#: The longest prefix of a module's dotted name counts: `draft.loading.pairing` is in `draft.loading`.
LEVELS = {
    "draft.__init__": 0,
    "draft.errors": 0,
    "files": 0,
    "ownership": 0,
    "logs": 0,
    "version": 0,
    "draft.configuration_dflash": 1,
    "draft.masking_dflash": 1,
    "draft.modeling_dflash": 2,
    "draft.layouts": 2,
    "target.__init__": 0,
    "target.block_attention": 2,
    "target.cache": 2,
    "target.probe": 3,
    "target.rope": 3,
    "target.target": 3,
    "target.processes": 3,
    "draft.loading": 3,
    "decoding.__init__": 0,
    "decoding.acceptance": 1,
    "decoding.drafting": 4,
    "decoding.text": 4,
    "decoding.options": 4,
    "decoding.rows": 4,
    "decoding.statistics": 4,
    "decoding.loop": 5,
    "decoding.generate": 6,
    "decoding.dispatch": 6,
    "decoding.comparison": 7,
    "draft.hub": 7,
    # What an exported draft carries: it reaches hf_dflash as any user does.
    "draft.hub.generate": 9,
    "draft.inspection": 7,
    "pair": 7,
    "prompts": 7,
    "smollm2": 7,
    "bench": 8,
    "training": 8,
    "hf_dflash_cli": 9,
    "__init__": 9,
    "__main__": 9,
}
HUB_FILES = {f"draft.{name}" for name in ("errors", "configuration_dflash", "masking_dflash", "modeling_dflash")}
#: Modules of the command line that commands import when they run; `train` makes its flags from the settings.
IMPORTED_BY_COMMANDS = {f"hf_dflash_cli.{name}" for name in ("answer", "benchmark", "conversation", "train")}
ALWAYS_THERE = {"torch", "transformers"}
BROUGHT_BY_TRANSFORMERS = {"huggingface_hub", "numpy", "safetensors", "tokenizers", "tqdm"}
BROUGHT_FOR_THE_COMMAND_LINE = {"rich", "typer"}


class Import(NamedTuple):
    line: int
    name: str  # absolute and dotted, as far as the statement says: "torch.nn", "hf_dflash.target.cache.TargetCache"
    relative: bool
    at_import: bool  # False inside a function


def module_of(path: Path) -> str:
    """Dotted name as `LEVELS` has it: `draft.hub.card` for hf_dflash/draft/hub/card.py, `hf_dflash_cli.app` for the
    command line's.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "hf_dflash" else parts)


def level_key(name: str) -> str | None:
    """The entry of `LEVELS` for a module, or for a name in one; None where there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LEVELS), None)


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
            # `from ..hub import X` in draft/loading/a.py: level 2 cuts one folder from (hf_dflash, draft, loading).
            folders = list(path.relative_to(ROOT).parts[:-1])
            base = folders[: len(folders) - node.level + 1] + base
        for alias in node.names:
            yield Import(node.lineno, ".".join([*base, alias.name]), bool(node.level), at_import)


def complaint(module: str, found: Import) -> str | None:
    """What is wrong with one import of a module (as `LEVELS` names it); None when it is as it should be."""
    key, top = level_key(module), found.name.split(".")[0]
    light = key == "hf_dflash_cli" and module not in IMPORTED_BY_COMMANDS
    if top in PACKAGES:
        source = level_key(found.name.removeprefix("hf_dflash.")) or "__init__"
        if LEVELS[source] > LEVELS[key]:
            return f"level {LEVELS[key]} ({key}) imports from level {LEVELS[source]} ({source})"
        if key in HUB_FILES and not found.relative:
            return "a Hub file names hf_dflash, which is not there on the Hub"
        if light and top == "hf_dflash" and found.at_import:
            return "the command line imports hf_dflash, and so torch, before a command runs"
        return None
    if light and top in ALWAYS_THERE and found.at_import:
        return f"the command line imports {top} before a command runs"
    if top in sys.stdlib_module_names or top in ALWAYS_THERE:
        return None
    if key in HUB_FILES:
        return f"a Hub file imports {top}"
    if top in BROUGHT_BY_TRANSFORMERS or (key == "hf_dflash_cli" and top in BROUGHT_FOR_THE_COMMAND_LINE):
        return None
    return f"{top} is imported outside the function that needs it" if found.at_import else None


def complaints(path: Path, source: str) -> list[str]:
    module, shown = module_of(path), path.relative_to(ROOT)
    if level_key(module) is None:
        return [f"{shown}: no level is known for '{module}'"]
    found = [(each.line, complaint(module, each)) for each in imports_of(path, source)]
    return [f"{shown}:{line}: {text}" for line, text in found if text]


def test_every_file_keeps_to_its_level():
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert files
    assert [text for path in files for text in complaints(path, path.read_text(encoding="utf-8"))] == []


TARGET = "hf_dflash/target/target.py"
NETWORK = "hf_dflash/draft/modeling_dflash.py"
CONFIGURATION = "hf_dflash/draft/configuration_dflash.py"


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("hf_dflash/decoding/acceptance.py", "from hf_dflash.decoding.loop import decode", "imports from level 5"),
        ("hf_dflash/target/cache/full.py", "from ..target import Target", "imports from level 3"),
        ("hf_dflash/draft/loading/a.py", "def f():\n    import hf_dflash", "imports from level 9"),
        (TARGET, "import accelerate", "outside the function"),
        (TARGET, "try:\n    import peft\nexcept ImportError:\n    peft = None", "outside the function"),
        (TARGET, "class A:\n    import rich", "outside the function"),
        (NETWORK, "from hf_dflash.draft.errors import DFlashError", "names hf_dflash"),
        (NETWORK, "def f():\n    import safetensors", "a Hub file imports safetensors"),
        (CONFIGURATION, "from .modeling_dflash import DFlashDraftModel", "imports from level 2"),
        ("hf_dflash/helpers.py", "", "no level is known"),
        ("hf_dflash/draft/helpers.py", "", "no level is known"),
        ("hf_dflash_cli/chat.py", "import torch", "imports torch before a command runs"),
        ("hf_dflash_cli/chat.py", "from hf_dflash.pair import load_pair", "before a command runs"),
    ],
)
def test_a_violation_is_seen(file, source, expected):
    (said,) = complaints(ROOT / file, source)
    assert expected in said


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            NETWORK,
            "from .errors import DFlashError\nimport torch.nn as nn\nfrom transformers import PreTrainedModel",
        ),
        ("hf_dflash/draft/hub/a.py", "def f():\n    import accelerate"),
        ("hf_dflash_cli/bench.py", "import typer\ndef f():\n    import torch\n    from hf_dflash.bench import run"),
        (TARGET, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import peft"),
    ],
)
def test_what_is_allowed_passes(file, source):
    assert complaints(ROOT / file, source) == []
