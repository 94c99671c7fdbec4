"""The folder of a training run: what an earlier run made there, where to resume, and what may be replaced.

A run replaces and deletes only what an earlier run verifiably made (see `hf_dflash.ownership`); anything else is named
before the target is loaded. A checkpoint gets its receipt before the first file and the marker `complete` after the
last, which lists the files with their sizes.
"""

import json
import os
import re
import shutil
from pathlib import Path

from hf_dflash.draft.errors import TrainingError
from hf_dflash.files import atomic_write
from hf_dflash.logs import get_logger
from hf_dflash.ownership import foreign_files, has_receipt, record_made, shorten
from hf_dflash.training.settings import TrainingSettings, setting_fields

logger = get_logger(__name__)

SETTINGS_FILE, SPLIT_FILE, REPORT_FILE, PLOT_FILE = "training.yaml", "held_out.json", "report.json", "training.png"
DRAFT_FOLDER = "draft"
COMPLETE = "complete"
"""Marker file, written last: a checkpoint without it is incomplete and not resumed from."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MAY_DIFFER = {
    "out",
    "log_every",
    "evaluate_every",
    "save_every",
    "keep",
    "report_to",
    "final_prompts",
    "final_tokens",
    "layout",
}
"""Settings that a resumed run may change: they do not affect the weights."""


def check_folder(out: Path, settings: TrainingSettings, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. Nothing on disk is changed.

    Raises:
        TrainingError: `out` cannot be a folder; it holds what no earlier run made; a new run would mix with the
            checkpoints of an earlier one; or there is nothing to resume, or it was trained with other settings.
    """
    _check_place(out)
    latest = last_complete_checkpoint(out)
    if latest is None:
        if resume:
            raise TrainingError(
                f"--resume: {out} has no complete checkpoint; start without --resume, or set --out to the folder of "
                "the run"
            )
        if not has_receipt(out) and (found := _entries(out)):
            raise TrainingError(
                f"--out {out} is not empty and was not made by `hf-dflash train` (found {shorten(found)}). Choose a "
                "new or empty folder"
            )
    elif not resume:
        raise TrainingError(f"{out} already holds checkpoints: continue with --resume, or choose another folder")
    replaced = [REPORT_FILE, PLOT_FILE]
    if not resume:
        replaced += [SETTINGS_FILE, SPLIT_FILE]
    elif _check_settings(out, settings) != settings:
        replaced.append(SETTINGS_FILE)
    foreign = [folder.name for folder in _checkpoints(out) if not _is_ours(folder)] + foreign_files(out, replaced)
    foreign += [f"{DRAFT_FOLDER}/{name}" for name in foreign_files(out / DRAFT_FOLDER)]
    if foreign:
        raise TrainingError(
            f"{out} holds {shorten(foreign)}, which no earlier run verifiably made and this run would replace. Move "
            "it elsewhere, or choose another folder"
        )
    return latest


def start_run(out: Path, settings: TrainingSettings) -> None:
    """Make the folder of a run and write its settings, unless they are there already.

    Raises:
        TrainingError: the folder cannot be written to.
    """
    path = out / SETTINGS_FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        record_made(out, [])
        if not path.exists() or TrainingSettings.from_yaml(path) != settings:
            settings.to_yaml(path)
            record_made(out, [SETTINGS_FILE])
    except OSError as error:
        raise TrainingError(f"--out {out} cannot be written to: {error}") from error


def last_complete_checkpoint(out: str | Path) -> Path | None:
    """Return the latest complete checkpoint under `out`."""
    return next((folder for folder in reversed(_checkpoints(Path(out))) if _completed(folder) is not None), None)


def claim_checkpoint(folder: Path) -> None:
    """Make the folder of a new checkpoint, in place of one that an earlier run of ours left incomplete.

    Raises:
        TrainingError: something else has this name.
    """
    if os.path.lexists(folder):
        if not _is_ours(folder):
            raise TrainingError(
                f"{folder} was put there by something else, so no checkpoint can be saved. Move it elsewhere and "
                "continue with --resume"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    record_made(folder, [])


def complete_checkpoint(folder: Path, keep: int) -> None:
    """Mark a checkpoint as complete, and then delete all but the latest `keep` complete ones beside it.

    An older one to which the user added files is kept, with a warning.
    """
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    atomic_write(folder / COMPLETE, json.dumps({"step": _step(folder), "files": sizes}))
    complete = [other for other in _checkpoints(folder.parent) if _completed(other) is not None]
    for old in complete[: -max(keep, 1)]:
        made = (_completed(old) or {}) | {COMPLETE: None}
        extra = sorted(
            name
            for path in old.rglob("*")
            if (path.is_symlink() or not path.is_dir())
            and (name := path.relative_to(old).as_posix()) != COMPLETE
            and (path.is_symlink() or made.get(name) != path.stat().st_size)
        )
        if extra:
            logger.warning(f"{old} is kept: this run did not write {shorten(extra)} in it")
        else:
            shutil.rmtree(old)


def _check_place(out: Path) -> None:
    """Check that `out` is a folder, or can become one."""
    existing = out.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise TrainingError(f"--out {out}: {existing} is not a folder; training writes a folder of files")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise TrainingError(f"--out {out}: no permission to write to {existing}")


def _check_settings(out: Path, settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of the run in `out`, which must agree with the present ones in all that affects weights."""
    stored = TrainingSettings.from_yaml(out / SETTINGS_FILE)
    names = sorted(item.name for item in setting_fields() if item.name not in _MAY_DIFFER)
    mismatches = [
        f"{name} {getattr(stored, name)!r} (now {getattr(settings, name)!r})"
        for name in names
        if getattr(stored, name) != getattr(settings, name)
    ]
    if mismatches:
        raise TrainingError(f"--resume: {out} was trained with different settings: {'; '.join(mismatches)}")
    return stored


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _checkpoints(out: Path) -> list[Path]:
    """Return everything named like a checkpoint, by step."""
    return sorted((out / name for name in _entries(out) if _CHECKPOINT.fullmatch(name)), key=_step)


def _step(folder: Path) -> int:
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and (has_receipt(folder) or _completed(folder) is not None)


def _completed(folder: Path) -> dict[str, int] | None:
    """Return the files (name to size) of a complete checkpoint, or None if it is not complete.

    Versions up to 0.1 did not list the files.
    """
    try:
        marker = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or marker.get("step") != _step(folder):
        return None
    return marker.get("files") or {}


__all__ = [
    "COMPLETE",
    "DRAFT_FOLDER",
    "PLOT_FILE",
    "REPORT_FILE",
    "SETTINGS_FILE",
    "SPLIT_FILE",
    "check_folder",
    "claim_checkpoint",
    "complete_checkpoint",
    "last_complete_checkpoint",
    "start_run",
]
