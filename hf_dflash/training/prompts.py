"""Prompts: where they come from and how they become token ids.

Owns: reading prompts from a JSONL file (`messages`, or a plain `prompt`) or from a named `datasets` data set, their
identity (a hash of the token ids) and their tokenisation with the target's chat template.

Does not know: models, responses, where anything is stored.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, TrainingError

MESSAGE_KEYS = ("messages", "conversations", "conversation")
TEXT_KEYS = ("prompt", "instruction", "question")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids (with the generation prompt of the chat template) and the line it came from."""

    ids: tuple[int, ...]
    source: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @property
    def key(self) -> str:
        """A name that is the same for the same token ids, in every process and session."""
        return hashlib.sha1(json.dumps(self.ids).encode()).hexdigest()[:16]


def read_rows(source: str | Path, *, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file, or of a `datasets` data set where no file of that name exists.

    Raises:
        TrainingError: the file is empty, or a line is not a JSON object (the message says which).
        MissingPackageError: `source` is no file and `datasets` is not installed.
    """
    path = Path(source)
    if not path.is_file():
        yield from _read_dataset(str(source), split)
        return
    found = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TrainingError(
                    f"{path}, line {number}: not JSON ({error.msg}); expected one JSON object per line"
                ) from error
            if not isinstance(row, dict):
                raise TrainingError(f"{path}, line {number}: found a {type(row).__name__}, expected a JSON object")
            found += 1
            yield row
    if not found:
        raise TrainingError(f"{path} is empty: expected one JSON object per line, with `messages` or `prompt`")


def _read_dataset(name: str, split: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(
            f"{name!r} is no file, and reading it as a data set needs the package `datasets`: "
            "`pip install datasets`, or give the path of a JSONL file"
        ) from error
    yield from datasets.load_dataset(name, split=split)


def to_messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The chat messages of a row, ending with the last user message: later (assistant) messages are what gets
    regenerated.

    ShareGPT's `from` / `value` and a plain `prompt` / `instruction` / `question` (with an optional `input`) are
    understood too.

    Raises:
        TrainingError: no known column, or no user message.
    """
    for key in MESSAGE_KEYS:
        if row.get(key):
            messages = [_to_message(message, f"{where}, `{key}`") for message in row[key]]
            break
    else:
        key = next((key for key in TEXT_KEYS if isinstance(row.get(key), str)), None)
        if key is None:
            raise TrainingError(
                f"{where}: found the keys {sorted(row)}, expected one of {', '.join(MESSAGE_KEYS + TEXT_KEYS)}"
            )
        extra = row.get("input") or ""
        messages = [{"role": "user", "content": f"{row[key]}\n\n{extra}" if extra else row[key]}]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise TrainingError(f"{where}: the conversation holds no user message to answer")
    return messages


def _to_message(message: Any, where: str) -> dict[str, str]:
    roles = {"human": "user", "gpt": "assistant"}
    if isinstance(message, dict) and isinstance(message.get("content"), str) and isinstance(message.get("role"), str):
        return {"role": message["role"], "content": message["content"]}
    if isinstance(message, dict) and isinstance(message.get("value"), str) and isinstance(message.get("from"), str):
        return {"role": roles.get(message["from"], message["from"]), "content": message["value"]}
    raise TrainingError(
        f"{where}: a message must be {{'role': ..., 'content': ...}} with text content, found {message!r:.80}"
    )


def read_prompts(
    source: str | Path,
    tokenizer: Any,
    *,
    split: str = "train",
    max_prompt_tokens: int = 2048,
    template_options: dict[str, Any] | None = None,
) -> list[Prompt]:
    """Read, tokenise and deduplicate prompts, in file order.

    Args:
        tokenizer: the target's; its chat template is applied with `add_generation_prompt=True` and `template_options`
            (for instance `{"enable_thinking": False}`). Without a chat template only `prompt` rows can be read, as
            plain text.
        max_prompt_tokens: longer prompts are left out, never cut.

    Raises:
        TrainingError: unreadable rows, or nothing left.
    """
    prompts, seen, long = [], set(), 0
    for number, row in enumerate(read_rows(source, split=split), start=1):
        prompt = Prompt(tuple(_tokenise(row, tokenizer, f"{source}, row {number}", template_options or {})), row)
        if len(prompt.ids) > max_prompt_tokens:
            long += 1
        elif prompt.key not in seen:
            seen.add(prompt.key)
            prompts.append(prompt)
    if not prompts:
        raise TrainingError(f"{source}: no prompt is left ({long} were longer than {max_prompt_tokens} tokens)")
    return prompts


def _tokenise(row: dict[str, Any], tokenizer: Any, where: str, options: dict[str, Any]) -> list[int]:
    messages = to_messages(row, where)
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(messages) > 1:
        raise TrainingError(f"{where}: a conversation needs a chat template, and this tokenizer has none")
    return tokenizer(messages[0]["content"])["input_ids"]


def batches(prompts: Iterable[Prompt], batch_size: int, window: int = 16) -> list[list[Prompt]]:
    """Cut the prompts into batches of like length: sorted by length inside windows of `window` batches, so padding
    stays small.

    The result depends only on the list, so that an interrupted run cuts it the same way again.
    """
    prompts, step = list(prompts), batch_size * window
    ordered = [
        p for at in range(0, len(prompts), step) for p in sorted(prompts[at : at + step], key=lambda p: len(p.ids))
    ]
    return [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
