"""A picture of a terminal: reads what a command printed, colors included, and writes it as SVG.

FORCE_COLOR=1 COLUMNS=90 hf-dflash demo | python docs/terminal_picture.py docs/assets/demo.svg "make demo"
"""

import sys

from rich.console import Console
from rich.text import Text

WIDTH = 92

path, title = sys.argv[1:3]
printed = sys.stdin.read().rstrip("\n")
console = Console(record=True, width=WIDTH, file=sys.stderr)
console.print(Text.from_ansi(printed))
console.save_svg(path, title=title)
