"""A picture of a terminal: reads what a command printed, colours included, and writes it as SVG.

FORCE_COLOR=1 COLUMNS=90 hf-dflash demo | python docs/terminal_picture.py docs/assets/demo.svg "make demo"
"""

import sys

from rich.console import Console
from rich.text import Text

path, title = sys.argv[1:3]
printed = sys.stdin.read().rstrip("\n")
console = Console(
    record=True, width=max(len(Text.from_ansi(line).plain) for line in printed.splitlines()), file=sys.stderr
)
console.print(Text.from_ansi(printed), soft_wrap=True)
console.save_svg(path, title=title)
