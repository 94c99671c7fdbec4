"""Turn what a command prints into a picture of a terminal, colors included.

FORCE_COLOR=1 COLUMNS=110 hf-dflash demo | python scripts/terminal_picture.py --out docs/assets/demo.svg
"""

import argparse
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="SVG file to write")
    parser.add_argument("--title", default="hf-dflash")
    parser.add_argument("--width", type=int, default=112, help="columns of the terminal")
    arguments = parser.parse_args()
    console = Console(record=True, width=arguments.width, file=sys.stderr)
    console.print(Text.from_ansi(sys.stdin.read().rstrip("\n")))
    console.save_svg(arguments.out, title=arguments.title)


if __name__ == "__main__":
    main()
