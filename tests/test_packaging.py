"""The wheel: built from the checkout, installed into a new environment, used there."""

import email
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hf_dflash.smollm2 import REPOSITORY
from hf_dflash.version import __version__

ROOT = Path(__file__).parent.parent
DRAFT = ROOT / "examples/smollm2_draft/draft"
PACKAGES = ("hf_dflash", "hf_dflash_cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # A copy, since building leaves files beside its sources that a later build would take in.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hf_dflash", "hf_dflash_cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_has_the_version_of_the_package(wheel):
    assert wheel.name == f"hf_dflash-{__version__}-py3-none-any.whl"


def test_the_wheel_has_every_module_and_the_prompts_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")}
    expected |= {"hf_dflash/chat.jsonl", *(f"{folder}/py.typed" for folder in PACKAGES)}
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 1_000_000


def test_the_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    assert metadata["Author"] and metadata["License-Expression"] == "Apache-2.0" and metadata["Summary"]
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL"))
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(urls)
    assert urls["Repository"] == REPOSITORY
    assert {"all", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert "Typing :: Typed" in metadata.get_all("Classifier")


@pytest.mark.slow
def test_the_wheel_works_in_a_new_environment(wheel, tmp_path):
    """The environment sees this one's packages, but hf_dflash only from the wheel."""
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=True)
    python = tmp_path / "env" / "bin" / "python"
    known = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "theirs.pth").write_text("\n".join(known))
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    code = (
        "import sys, hf_dflash; print(hf_dflash.__file__); print(hf_dflash.load_draft(sys.argv[1]).config.block_size)"
    )
    done = subprocess.run([python, "-c", code, DRAFT], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    file, block_size = done.stdout.splitlines()
    assert file.startswith(str(site))
    assert int(block_size) >= 2
    command = tmp_path / "env" / "bin" / "hf-dflash"
    said = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert said.stdout == f"hf-dflash {__version__}\n"
