"""Facts that tests measure, kept for the tables in the documentation.

Owns: `record`, which writes when the environment variable HF_DFLASH_RECORD names a folder, and does nothing otherwise.
`scripts/make_targets_table.py` reads what it wrote.

Does not know: what is measured.
"""

import json
import os
from pathlib import Path
from typing import Any

import transformers


def record(subject: str, name: str, fact: Any) -> None:
    """Append one fact, with the transformers version it holds for, as a line of JSON."""
    folder = os.environ.get("HF_DFLASH_RECORD")
    if folder:
        line = {"transformers": transformers.__version__, "subject": subject, "name": name, "fact": fact}
        with (Path(folder) / f"{subject}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
