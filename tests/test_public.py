"""The public interface is `hf_dflash` itself: complete, and all that documentation and examples import."""

import ast
import json
import re
from pathlib import Path

import pytest

import hf_dflash

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def lazy_imports_for_type_checkers() -> dict[str, str]:
    """Name -> module, from the `if TYPE_CHECKING:` block of the package."""
    tree = ast.parse((ROOT / "hf_dflash/__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: statement.module.removeprefix("hf_dflash.") for statement in block.body for alias in statement.names
    }


def test_type_checkers_see_the_lazy_names():
    assert lazy_imports_for_type_checkers() == hf_dflash._LAZY


def test_every_public_name_is_there_and_listed():
    assert set(hf_dflash._LAZY) <= set(hf_dflash.__all__) <= set(dir(hf_dflash))
    assert [name for name in hf_dflash.__all__ if not hasattr(hf_dflash, name)] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_dflash.no_such_name  # noqa: B018


def test_every_public_name_is_documented():
    documented = re.findall(r"^::: hf_dflash\.(\w+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.M)
    assert sorted(documented) == sorted(set(hf_dflash.__all__) - {"__version__"})


def sources() -> list:
    """Every piece of Python in the examples, their notebooks and the documentation."""
    found = {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
    for path in (ROOT / "examples").rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        found[str(path)] = re.sub(r"^( *)[%!].*", r"\1pass", "\n".join(code), flags=re.M)
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = FENCE.findall(page.read_text(encoding="utf-8"))
        found |= {f"{page}-{number}": block for number, block in enumerate(blocks, start=1)}
    return [pytest.param(code, id=str(Path(name).relative_to(ROOT))) for name, code in found.items()]


def private_imports(code: str) -> list[str]:
    """What a piece of code imports of hf_dflash other than public names."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith(("hf_dflash.", "hf_dflash_cli"))]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hf_dflash", "hf_dflash_cli"):
            public = hf_dflash.__all__ if node.module == "hf_dflash" else []
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public]
    return found


@pytest.mark.parametrize("code", sources())
def test_documentation_and_examples_import_only_what_is_public(code):
    assert private_imports(code) == []


@pytest.mark.parametrize(
    "code",
    [
        "from hf_dflash.draft.loading import load_draft",
        "import hf_dflash.training",
        "from hf_dflash import pair",
        "def f():\n    from hf_dflash_cli.app import main",
    ],
)
def test_a_private_import_is_seen(code):
    assert private_imports(code)
