"""The command `hf-dflash`.

Owns: the list of commands, what every command shares (`--version`, `--debug`), and how an error looks on the terminal.

Does not know: what a command does.
"""

import sys
from typing import Annotated

import typer

from hf_dflash.cli.bench import bench
from hf_dflash.cli.chat import chat
from hf_dflash.cli.data import data
from hf_dflash.cli.demo import demo
from hf_dflash.cli.export import export
from hf_dflash.cli.generate import generate
from hf_dflash.cli.inspect import inspect_
from hf_dflash.cli.train import train
from hf_dflash.errors import DFlashError
from hf_dflash.version import __version__

FAILED = 1
INTERRUPTED = 130

app = typer.Typer(
    name="hf-dflash",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, chat, bench, inspect_, export, data, train):
    app.command(command.__name__.rstrip("_"))(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-dflash {__version__}")
        raise typer.Exit


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works behind every command.")
    ] = False,
) -> None:
    """DFlash speculative decoding for transformers: the same text from generate(), sooner.

    Start with `hf-dflash demo`, which needs no other arguments.
    """


def main() -> None:
    """Run the command line; exit code 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    arguments, debug = _without_debug(sys.argv[1:])
    try:
        app(arguments, prog_name="hf-dflash")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        typer.echo(describe(error), err=True)
        sys.exit(FAILED)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, and whether it was among them; what stands behind `--` is text and stays."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return options + arguments[end:], len(options) < end


def describe(error: Exception) -> str:
    """An error as one line: hf_dflash's own speak for themselves, any other is named and points to `--debug`."""
    text = " ".join(str(error).split())
    if isinstance(error, DFlashError):
        return f"hf-dflash: {text}"
    return f"hf-dflash: {type(error).__name__}: {text or 'no message'} (--debug shows where)"
