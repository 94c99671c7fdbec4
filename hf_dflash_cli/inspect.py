"""`hf-dflash inspect`: what a draft is, and whether it fits a target.

Owns: how an inspection looks on a terminal. Does not know: how anything is found out.
"""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_dflash.inspection import Inspection, inspect_draft

BROKEN = 1


def inspect_(
    path: Annotated[str, typer.Argument(help="Folder or Hub id of a draft in any published layout.", metavar="PATH")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Target to hold it against; only its configuration is read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    revision: Annotated[str | None, typer.Option(help="Revision of the draft on the Hub.")] = None,
) -> None:
    """Show what a draft is, what it expects of its target, and all that is wrong with it.

    Exit code 0 when the draft (and the pair) can be used, 1 when not.
    """
    inspection = inspect_draft(path, target, revision=revision)
    if as_json:
        typer.echo(json.dumps(inspection.as_dict(), indent=2))
    else:
        show(inspection, Console())
    if inspection.problems:
        raise typer.Exit(BROKEN)


def show(inspection: Inspection, console: Console) -> None:
    """Prints an inspection for people."""
    console.print(f"[bold]{escape(inspection.name)}[/bold]")
    for title, values in (
        ("draft", inspection.draft),
        ("expects of its target", inspection.expects),
        ("target", inspection.target),
    ):
        if values:
            console.print(_table(title, values))
    for style, title, texts in (("yellow", "odd", inspection.warnings), ("red", "wrong", inspection.problems)):
        for text in texts:
            console.print(f"[{style}]{title}:[/{style}] {escape(text)}", soft_wrap=True)
    if inspection.pairs is not None:
        console.print("They belong together." if inspection.pairs else "They do not belong together.")
    elif not inspection.problems:
        console.print("Nothing is wrong.")


def _table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        if value is not None and value != []:
            table.add_row(key.replace("_", " "), escape(_plain(value)))
    return table


def _plain(value: Any) -> str:
    """A value without Python's punctuation; equal neighbours are counted: 4 x sliding_attention."""
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
