"""Exports a draft as a Hub-ready folder; uploading it is left to `huggingface_hub`.

`card` writes its README; `generate` becomes its `custom_generate/generate.py`.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from hf_dflash.draft.errors import CheckpointError
from hf_dflash.draft.hub.card import model_card
from hf_dflash.draft.loading import is_draft_checkpoint, load_draft
from hf_dflash.files import atomic_folder
from hf_dflash.ownership import foreign_files, record_made, shorten

_CUSTOM_GENERATE = Path("custom_generate")
_REQUIREMENTS = "hf-dflash\n"


def export_draft(
    source: str | Path,
    destination: str | Path,
    *,
    target: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    **options: Any,
) -> Path:
    """Write a draft in any published layout as a folder that plain transformers loads.

    The folder has the weights (safetensors, sharded if they are large), the canonical `config.json`, the code of the
    network, `custom_generate/` and a model card. It is written atomically.

    Args:
        source: folder or Hub id of a draft.
        destination: the folder to write.
        target: Hub id of the target, for the card and the configuration; default: the checkpoint's.
        dtype: to store in; default: the checkpoint's.
        max_shard_size: size limit of a weight file, in bytes or as "5GB".
        force: replace `destination` if it holds a draft that an earlier export or `save_draft` wrote, and nothing else.
        options: further options of `load_draft` (`revision`, `token`, ...).

    Returns:
        `destination`.

    Raises:
        CheckpointError: the source cannot be loaded, or the destination is in use.
    """
    destination = Path(destination).absolute()
    place = destination.resolve()  # through a link, the folder that it leads to is written
    _check_free(place, force)
    draft = load_draft(source, dtype=dtype, **options)
    if target is not None:
        draft.config.target_name_or_path = target
    with atomic_folder(place) as folder:
        # Also saves the network's code: the class is registered for AutoModel.
        draft.save_pretrained(folder, max_shard_size=max_shard_size)
        (folder / "README.md").write_text(model_card(draft), encoding="utf-8")
        (folder / _CUSTOM_GENERATE).mkdir()
        shutil.copyfile(Path(__file__).with_name("generate.py"), folder / _CUSTOM_GENERATE / "generate.py")
        (folder / _CUSTOM_GENERATE / "requirements.txt").write_text(_REQUIREMENTS, encoding="utf-8")
        record_made(folder)
    return destination


def _check_free(destination: Path, force: bool) -> None:
    """Refuse to overwrite anything; with `force`, anything but an earlier export and nothing else."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return
    if not force:
        raise CheckpointError(
            f"{destination} exists and is not empty. Choose another folder, or replace it with --force."
        )
    if not destination.is_dir() or not is_draft_checkpoint(destination):
        raise CheckpointError(
            f"{destination} does not hold a DFlash draft, so it is not replaced, not even with --force. "
            "Choose another folder or empty it yourself."
        )
    if foreign := foreign_files(destination):
        raise CheckpointError(
            f"{destination} holds files that hf-dflash did not verifiably write ({shorten(foreign)}), so it is not "
            "replaced, not even with --force. Choose another folder, or move these files."
        )


__all__ = ["export_draft", "model_card"]
