"""The package tells its own files on disk from those of others, and locks a file while it is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dflash.ownership import RECEIPT, foreign_files, has_receipt, lock_exclusively, record_made, shorten


@pytest.fixture
def made(tmp_path) -> Path:
    """A folder with two files that its receipt lists."""
    folder = tmp_path / "made"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "below" / "b.txt").write_text("b")
    record_made(folder)
    return folder


def test_what_was_recorded_is_ours(made, tmp_path):
    assert has_receipt(made) and foreign_files(made) == []
    assert foreign_files(tmp_path / "missing") == [] and not has_receipt(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert foreign_files(tmp_path / "empty") == []


@pytest.mark.parametrize(
    ("change", "foreign"),
    [
        (lambda folder: (folder / "thesis.tex").write_text("years"), ["thesis.tex"]),
        (lambda folder: (folder / "below" / "c.txt").write_text("c"), ["below/c.txt"]),
        (lambda folder: (folder / "a.txt").write_text("edited"), ["a.txt"]),
        (lambda folder: (folder / RECEIPT).unlink(), ["a.txt", "below/b.txt"]),
        (lambda folder: (folder / RECEIPT).write_text("{}"), [RECEIPT, "a.txt", "below/b.txt"]),
        (lambda folder: (folder / RECEIPT).write_text("not JSON"), [RECEIPT, "a.txt", "below/b.txt"]),
    ],
    ids=["added", "added below", "edited", "no receipt", "another receipt", "a broken receipt"],
)
def test_anything_else_is_not(made, change, foreign):
    change(made)
    assert sorted(foreign_files(made)) == sorted(foreign)


def test_links_are_never_ours(made, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (made / "a.txt").unlink()
    (made / "a.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")  # the same content
    (made / "folder").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert foreign_files(made) == ["a.txt", "folder"]


def test_named_files_alone_are_looked_at(made):
    (made / "notes.txt").write_text("mine")
    assert foreign_files(made, ["a.txt", "report.json"]) == []
    assert foreign_files(made, ["a.txt", "notes.txt"]) == ["notes.txt"]
    record_made(made, ["notes.txt"])
    assert foreign_files(made) == []
    assert set(json.loads((made / RECEIPT).read_text())["files"]) == {"a.txt", "below/b.txt", "notes.txt"}


def test_a_file_in_place_of_the_folder_is_foreign(tmp_path):
    (tmp_path / "draft").write_text("my draft of a letter")
    assert foreign_files(tmp_path / "draft") == ["draft"]


def test_long_lists_are_shortened():
    assert shorten(["a", "b"], 2) == "a, b" and shorten(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_a_lock_is_exclusive_and_ends_with_its_file_or_its_process(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("a") as first:
        lock_exclusively(first)
        with path.open("a") as second, pytest.raises(BlockingIOError):
            lock_exclusively(second)
    code = (
        "import sys\nfrom hf_dflash.ownership import lock_exclusively\nfile = open(sys.argv[1], 'a')\n"
        "lock_exclusively(file)\nprint('locked', flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    with process, path.open("a") as file:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError):
            lock_exclusively(file)
        process.kill()  # as a crash ends it
        process.wait()
        lock_exclusively(file)
