"""CONTRIBUTING's map of the package, the citation and the changelog: they say what is there."""

import re
from pathlib import Path

import pytest
import yaml

from hf_dflash.version import __version__

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAP = PAGE.partition("## Running the tests")[0]
#: Folder -> names that its modules must define, for each "To add ..." row of the map.
PLACES = {
    "hf_dflash/target/cache/": ["BlockLayer", "Replay"],
    "hf_dflash/draft/layouts/": ["LAYOUTS"],
    "tests/families.py": ["FAMILIES"],
    "hf_dflash/decoding/drafting.py": ["propose"],
    "hf_dflash/bench/methods.py": ["METHODS", "Method"],
    "hf_dflash/prompts.py": ["SETS"],
    "hf_dflash_cli/": ["COMMANDS"],
    "hf_dflash/__init__.py": ["__all__"],
}


def test_the_map_shows_every_folder():
    shown = re.findall(r"^\| `(\w+)/` \|", MAP, re.M)
    folders = [path.name for path in (ROOT / "hf_dflash").iterdir() if (path / "__init__.py").is_file()]
    assert sorted(shown) == sorted(folders)


def test_the_map_names_every_module_beside_the_folders():
    modules = {path.name for path in (ROOT / "hf_dflash").glob("*.py")} - {"__init__.py", "__main__.py", "version.py"}
    assert modules <= set(re.findall(r"`(\w+\.py)`", MAP))


def test_every_place_in_the_map_is_there():
    rows = re.findall(r"^\| an? [^|]+ \| `([^`]+)` \|", MAP, re.M)
    assert rows == list(PLACES)


@pytest.mark.parametrize("place", PLACES)
def test_what_the_map_names_is_defined_there(place):
    path = ROOT / place
    source = "\n".join(each.read_text(encoding="utf-8") for each in (path.rglob("*.py") if path.is_dir() else [path]))
    for name in PLACES[place]:
        assert re.search(rf"^ *(class|def) {name}\b|^{name}\b.* = ", source, re.M), name


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:hf_dflash|hf_dflash_cli|tests|scripts|docs)/[\w./]*)`", PAGE)))
)
def test_every_path_on_the_page_exists(path):
    assert (ROOT / path.replace("NAME", "index")).exists()


def test_every_make_target_on_the_page_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^make ([\w-]+)", PAGE, re.M)):
        assert f"\n{target}:" in makefile, target


def test_the_citation_and_the_changelog_have_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_workflow_and_the_templates_are_valid_and_ci_is_one_script():
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
    assert "bash .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
