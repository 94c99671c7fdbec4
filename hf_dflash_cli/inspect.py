"""`hf-dflash inspect`: prints what `inspect_draft` finds out about a draft and its fit with a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from hf_dflash.draft.inspection import Inspection

BROKEN = 1


def inspect(
    path: Annotated[str, typer.Argument(help="Folder or Hub id of a draft in any published layout.", metavar="PATH")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Target to check it against; only its configuration is read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    revision: Annotated[str | None, typer.Option(help="Revision of the draft on the Hub.")] = None,
) -> None:
    """Show what a draft is, what it needs from its target, and any problems.

    Exit code 0 if the draft (and the pair) can be used, 1 otherwise.
    """
    from hf_dflash.draft.inspection import inspect_draft
    from hf_dflash.files import dump_json

    inspection = inspect_draft(path, target, revision=revision)
    if as_json:
        typer.echo(dump_json(inspection.as_dict(), indent=2))
    else:
        show(inspection, Console())
    if inspection.problems:
        raise typer.Exit(BROKEN)


def show(inspection: Inspection, console: Console) -> None:
    """Print an inspection as tables and sentences."""
    console.print(f"[bold]{escape(inspection.name)}[/bold]")
    for title, values in (
        ("draft", inspection.draft),
        ("expects from its target", inspection.expects),
        ("target", inspection.target),
    ):
        if values:
            console.print(_table(title, values))
    for style, title, texts in (("yellow", "warning", inspection.warnings), ("red", "error", inspection.problems)):
        for text in texts:
            console.print(f"[{style}]{title}:[/{style}] {escape(text)}", soft_wrap=True)
    if inspection.pairs is not None:
        console.print("The draft fits the target." if inspection.pairs else "The draft does not fit the target.")
    elif not inspection.problems:
        console.print("No problems found.")


def _table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        if value is not None and value != []:
            table.add_row(key.replace("_", " "), escape(_plain(value)))
    return table


def _plain(value: Any) -> str:
    """A value without Python's punctuation; runs of equal values are counted: 4 x sliding_attention."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if not isinstance(value, list):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    runs: list[list[Any]] = []
    for entry in value:
        if runs and runs[-1][0] == entry:
            runs[-1][1] += 1
        else:
            runs.append([entry, 1])
    return ", ".join(_plain(entry) if count == 1 else f"{count} x {_plain(entry)}" for entry, count in runs)
