"""The entry point `hf-dflash`: the list of commands, the options they all share, and what an error looks like.

Each command is a module of the same name, imported when it runs or shows its own help.
"""

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

FAILED = 1
INTERRUPTED = 130

#: Command -> the first line of its help, so that the overview needs no module of a command.
COMMANDS = {
    "demo": "Answer a few prompts with and without a draft, and compare.",
    "generate": "Generate an answer to one prompt.",
    "chat": "Chat with the target, turn by turn.",
    "bench": "Compare decoding methods on the same prompts, in one process.",
    "inspect": "Show what a draft is, what it needs from its target, and any problems.",
    "export": "Write a draft as a Hub-ready folder that plain transformers loads.",
    "data": "Regenerate responses with the target, as training data for `hf-dflash train`.",
    "train": "Train a draft for your own target.",
}
CONTEXT = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """A group whose commands are placeholders, replaced by the real ones when a command line names them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else placeholder, rest


def load(name: str) -> Any:
    """The click command of a name in `COMMANDS`, from the module that has it."""
    module = importlib.import_module(f"hf_dflash_cli.{name}")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=CONTEXT)
    single.command(name)(getattr(module, name))
    return typer.main.get_command(single)


app = typer.Typer(
    name="hf-dflash",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-dflash {_version()}")
        raise typer.Exit


def _version() -> str:
    """From the metadata of the installation, which is quick; a checkout that is not installed imports the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hf-dflash")
    except PackageNotFoundError:
        from hf_dflash.version import __version__

        return __version__


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; accepted after every command.")
    ] = False,
) -> None:
    """DFlash speculative decoding for transformers: the same text as generate(), faster.

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
    """The arguments without `--debug`, and whether it was among them; anything after `--` is text and stays."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return options + arguments[end:], len(options) < end


def describe(error: Exception) -> str:
    """An error as one line: hf_dflash's own messages as they are, any other with its class and a hint at `--debug`."""
    text = " ".join(str(error).split())
    # Where the module was never imported, no error can be one of its own.
    errors = sys.modules.get("hf_dflash.draft.errors")
    if errors is not None and isinstance(error, errors.DFlashError):
        return f"hf-dflash: {text}"
    return f"hf-dflash: {type(error).__name__}: {text or 'no message'} (use --debug for the traceback)"
