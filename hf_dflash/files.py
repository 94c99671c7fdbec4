"""Reading JSON lines, and writing files and folders so that a reader never sees half of one.

What the lines mean and what is written is left to the callers.
"""

import gzip
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers (from 1); empty lines are skipped, `.gz` is unpacked.

    Raises:
        ValueError: a line is not a JSON object; the message names the file, the line and what was found.
    """
    path = Path(path)
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not JSON ({error.msg}); expected one JSON object per line"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: found a {type(row).__name__}, expected a JSON object")
            yield number, row


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file to; it replaces `path` when the block ends, and is removed if it fails."""
    partial = _beside(path, "partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def atomic_write(path: Path, text: str) -> None:
    """Write a UTF-8 file as a whole; if that fails, an existing file stays as it was."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends, and is removed if it fails.

    A folder cannot replace a non-empty one in one move, so the former one steps aside first and is put back if the move
    fails. Whether it may be replaced at all is for the caller to check.
    """
    partial, former = _beside(folder, "partial"), _beside(folder, "former")
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rename(former)
        try:
            partial.rename(folder)
        except OSError:
            if former.exists():
                former.rename(folder)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)


def _beside(path: Path, purpose: str) -> Path:
    """A hidden name in the same folder that nothing else has: never a file or folder of the user's."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{purpose}")
