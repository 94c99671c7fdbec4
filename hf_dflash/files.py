"""Reading text and JSON lines as UTF-8, and writing JSON, files and folders so that a reader never sees half of one.

What the lines mean and what is written is left to the callers.
"""

import gzip
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import PromptError

BOM = "\ufeff"


def check_text(text: str, where: str) -> str:
    """Return a text as it is if it can be written as UTF-8.

    Args:
        text: undecodable bytes are in it if it was read with `errors="surrogateescape"`, as Python reads arguments.
        where: what the message calls the text.

    Raises:
        PromptError: it has a byte that is not UTF-8, or a lone surrogate; the message says which and where.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the lone surrogate U+{code:04X}"
        raise PromptError(
            f"{where}: found {found} at character {error.start + 1}, expected UTF-8 text; convert it to UTF-8"
        ) from error
    return text


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers (from 1); empty lines are skipped, `.gz` is unpacked.

    A byte order mark is skipped at the start of any line, since files are also appended to each other.

    Raises:
        ValueError: a line is not UTF-8 or not a JSON object; the message names the file, the line and what was found.
    """
    path = Path(path)
    opened = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", errors="surrogateescape")
    with opened as lines:
        for number, read in enumerate(lines, start=1):
            line = check_text(read.removeprefix(BOM), f"{path}, line {number}")
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


def dump_json(value: Any, **options: Any) -> str:
    """Return a value as JSON that every parser reads: NaN and infinity become null. Options are `json.dumps`'s."""
    return json.dumps(without_nan(value), allow_nan=False, **options)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return value


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
