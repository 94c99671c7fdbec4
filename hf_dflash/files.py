"""Writing files so that a reader never meets half of one.

Owns: the partial file beside the final one, and its renaming. Does not know: what is written.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file, or leave the one that is there as it was, whatever ends the writing."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
