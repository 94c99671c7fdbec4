"""What this package made on disk, and which file it is writing, so that nothing else is replaced, deleted or mixed up.

A folder that the package makes gets a receipt, `made_by_hf_dflash.json`, with the SHA-256 of every file that was
written. A file is verifiably ours if the receipt beside it lists it with the digest that it still has: anything that
was added, edited or put in its place belongs to the user. What may be replaced is left to the callers.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from hf_dflash.files import atomic_write

RECEIPT = "made_by_hf_dflash.json"

_MAKER = "hf-dflash"
_WINDOWS_LOCK_AT = 2**31 - 2
"""Position of the byte that is locked on Windows, where a lock also keeps others from reading it."""


def record_made(folder: Path, names: Iterable[str] | None = None) -> None:
    """Add files of `folder` to its receipt as made by this package: the named ones, or by default all of them."""
    names = [name for name in (_files_in(folder) if names is None else names) if name != RECEIPT]
    made = (_read_receipt(folder) or {}) | {name: _digest(folder / name) for name in names}
    atomic_write(folder / RECEIPT, json.dumps({"made_by": _MAKER, "files": made}, indent=1) + "\n")


def has_receipt(folder: Path) -> bool:
    """Return whether this package made the folder (not necessarily all that is in it by now)."""
    return _read_receipt(folder) is not None


def foreign_files(folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the files that this package did not verifiably make; they must not be replaced or deleted.

    Args:
        folder: may be missing or empty.
        names: only these, as far as they exist. Default: every file in the folder and below.
    """
    if not folder.is_dir():
        return [folder.name] if os.path.lexists(folder) else []
    made = _read_receipt(folder)
    if names is None:
        names = [name for name in _files_in(folder) if made is None or name != RECEIPT]
    return [name for name in names if os.path.lexists(folder / name) and not _is_made(folder / name, name, made)]


def shorten(names: list[str], count: int = 5) -> str:
    """Join the first names for a message and count the rest."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


def lock_exclusively(file: IO[Any]) -> None:
    """Lock a file that is open for writing, for as long as it is open. A process that ends, even by a crash, lets go.

    Raises:
        BlockingIOError: another process (or another open file of this one) holds the lock.
        OSError: the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(file.fileno(), _WINDOWS_LOCK_AT, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from error
        finally:
            os.lseek(file.fileno(), 0, os.SEEK_END)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_made(path: Path, name: str, made: dict[str, str] | None) -> bool:
    return made is not None and path.is_file() and not path.is_symlink() and made.get(name) == _digest(path)


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the files below a folder as relative POSIX paths, sorted; a link counts as a file and is not followed."""
    for where, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in sorted([*files, *links]):
            yield (Path(where) / name).relative_to(folder).as_posix()


def _read_receipt(folder: Path) -> dict[str, str] | None:
    """Return name to digest, or None if there is no receipt of this package."""
    try:
        receipt = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(receipt, dict) or receipt.get("made_by") != _MAKER or not isinstance(receipt.get("files"), dict):
        return None
    return receipt["files"]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
