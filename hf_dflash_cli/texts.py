"""Text from outside: arguments, standard input and files are UTF-8, possibly with a byte order mark."""

import sys
from pathlib import Path

BOM = "\ufeff"


def read_file(path: Path) -> str:
    """The text of a file, without a byte order mark; `checked` reports bytes that are not UTF-8."""
    return path.read_text(encoding="utf-8", errors="surrogateescape").removeprefix(BOM)


def read_standard_input() -> str:
    """The text on standard input, without a byte order mark; `checked` reports bytes that are not UTF-8."""
    pass_undecodable_bytes()
    return sys.stdin.read().removeprefix(BOM)


def pass_undecodable_bytes() -> None:
    """Read undecodable bytes on standard input as Python reads those in arguments, instead of failing."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="surrogateescape")


def checked(text: str, source: str) -> str:
    """The text; `source` names it in the message.

    Raises:
        PromptError: it has bytes that are not UTF-8.
    """
    from hf_dflash.files import check_text

    return check_text(text, source)
