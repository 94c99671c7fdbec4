"""`hf-dflash export`: a Hub-ready folder. This module only reads the arguments of `export_draft`."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a draft in any published layout.", metavar="SRC")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.", metavar="DST")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Hub id of its target, if the checkpoint does not name it.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; default: the checkpoint's.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of SRC on the Hub.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in DST.")] = False,
) -> None:
    """Write a draft as a Hub-ready folder that plain transformers loads.

    Upload it with `hf upload NAME DST`.
    """
    from hf_dflash import export_draft

    folder = export_draft(
        source,
        destination,
        target=target,
        dtype=dtype,
        revision=revision,
        max_shard_size=max_shard_size,
        force=force,
    )
    typer.echo(f"Wrote {folder}.")
    if target is None and "base_model:" not in (folder / "README.md").read_text(encoding="utf-8"):
        typer.echo("The checkpoint does not name its target: add --target, or base_model to README.md, by hand.")
