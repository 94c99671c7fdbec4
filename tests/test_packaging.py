"""The wheel: built from the checkout, installed into a new environment, used there."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hf_dflash.version import __version__

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # A copy, since building leaves files beside its sources that a later build would take in.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hf_dflash", "examples/smollm2_draft/draft"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_has_the_version_of_the_package(wheel):
    assert wheel.name == f"hf_dflash-{__version__}-py3-none-any.whl"


def test_the_wheel_has_every_module_the_draft_and_the_prompts(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_dflash").rglob("*.py")}
    data = {"config.json", "model.safetensors", "README.md"}
    expected = modules | {f"hf_dflash/bench/demo_draft/{name}" for name in data}
    expected |= {"hf_dflash/bench/chat.jsonl", "hf_dflash/py.typed"}
    assert expected - names == set()
    assert [name for name in names - expected if ".dist-info/" not in name] == []


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
        "import hf_dflash; from hf_dflash.bench.smollm2 import draft_folder;"
        "print(hf_dflash.__file__); print(hf_dflash.load_draft(draft_folder()).config.block_size)"
    )
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    file, block_size = done.stdout.splitlines()
    assert file.startswith(str(site))
    assert int(block_size) >= 2
    command = tmp_path / "env" / "bin" / "hf-dflash"
    said = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert said.stdout == f"hf-dflash {__version__}\n"
