"""Exporting a draft as a folder that is ready for the Hub.

Owns: `export_draft`: which files such a folder has, and that it appears whole or not at all. `card` writes its README;
`generate` is the file that it carries as `custom_generate/generate.py`.

Does not know: published layouts (the draft is loaded first), uploading (`huggingface_hub` does that), command lines.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from hf_dflash.draft.errors import CheckpointError
from hf_dflash.draft.hub.card import model_card
from hf_dflash.draft.loading import is_draft_checkpoint, load_draft
from hf_dflash.files import atomic_folder

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
    """Writes a draft of any published layout as a folder that plain transformers loads.

    The folder holds the weights (safetensors, sharded where they are large), the canonical `config.json`, the code of
    the network, `custom_generate/` and a model card. It is written beside `destination` and moved there when complete.

    Args:
        source: folder or Hub id of a draft.
        destination: the folder to write.
        target: Hub id of the target, for the card and the configuration; default: what the checkpoint says.
        dtype: to store in; default: the checkpoint's.
        max_shard_size: the largest weight file, in bytes or as "5GB".
        force: replace `destination` where it already holds a draft.
        options: further options of `load_draft` (`revision`, `token`, ...).

    Returns:
        `destination`.

    Raises:
        CheckpointError: the source cannot be loaded, or the destination is in use.
    """
    destination = Path(destination).absolute()
    _check_free(destination, force)
    draft = load_draft(source, dtype=dtype, **options)
    if target is not None:
        draft.config.target_name_or_path = target
    with atomic_folder(destination) as folder:
        # The network's class brings its code along, as every class does that is made for AutoModel.
        draft.save_pretrained(folder, max_shard_size=max_shard_size)
        (folder / "README.md").write_text(model_card(draft), encoding="utf-8")
        (folder / _CUSTOM_GENERATE).mkdir()
        shutil.copyfile(Path(__file__).with_name("generate.py"), folder / _CUSTOM_GENERATE / "generate.py")
        (folder / _CUSTOM_GENERATE / "requirements.txt").write_text(_REQUIREMENTS, encoding="utf-8")
    return destination


def _check_free(destination: Path, force: bool) -> None:
    """Refuses to write over anything, and with `force` over anything but a draft."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return
    if not force:
        raise CheckpointError(
            f"{destination} exists and is not empty. Choose another folder, or replace it with --force."
        )
    if not destination.is_dir() or not is_draft_checkpoint(destination):
        raise CheckpointError(
            f"{destination} does not hold a DFlash draft, so it is not replaced, not even with --force. "
            "Choose another folder or empty it by hand."
        )


__all__ = ["export_draft", "model_card"]
