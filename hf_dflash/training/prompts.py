"""Prompts as token ids: chat template, tokenization, deduplication, and batches of similar length.

Reading prompt files and data sets is left to `hf_dflash.prompts`, answering the prompts to `regenerate`.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import TrainingError
from hf_dflash.prompts import Prompt, read_dataset, read_prompt_file


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt (including the chat template's generation prompt) and the row it came from."""

    ids: tuple[int, ...]
    row: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @property
    def key(self) -> str:
        """A stable hash of the token ids, the same in every process and session."""
        return hashlib.sha1(json.dumps(self.ids).encode()).hexdigest()[:16]


def read_prompts(
    source: str | Path,
    tokenizer: Any,
    *,
    split: str = "train",
    max_prompt_tokens: int = 2048,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[TokenizedPrompt]:
    """Read, tokenize and deduplicate prompts.

    Args:
        source: path to a JSON Lines file, or the name of a `datasets` data set.
        tokenizer: the target's. Conversations go through its chat template with `chat_template_kwargs` (for example
            `{"enable_thinking": False}`). Without a chat template, only single prompts are supported, as plain text.
        split: split of the data set.
        max_prompt_tokens: longer prompts are skipped, never truncated.

    Raises:
        PromptError: a row is not a prompt; the message names the row.
        TrainingError: there are no prompts, all are too long, or a conversation was given without a chat template.
        MissingPackageError: `source` is not a file and `datasets` is not installed.
    """
    rows = read_prompt_file(source) if Path(source).is_file() else read_dataset(str(source), split)
    prompts, seen, too_long, number = [], set(), 0, 0
    for number, prompt in enumerate(rows, start=1):
        ids = _tokenize(prompt, tokenizer, f"{source}, row {number}", chat_template_kwargs or {})
        tokenized = TokenizedPrompt(tuple(ids), prompt.row)
        if len(tokenized.ids) > max_prompt_tokens:
            too_long += 1
        elif tokenized.key not in seen:
            seen.add(tokenized.key)
            prompts.append(tokenized)
    if not number:
        raise TrainingError(f"{source} is empty: expected one JSON object per line, with `messages` or `prompt`")
    if not prompts:
        raise TrainingError(f"{source}: no prompts left ({too_long} were longer than {max_prompt_tokens} tokens)")
    return prompts


def _tokenize(prompt: Prompt, tokenizer: Any, where: str, chat_template_kwargs: dict[str, Any]) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, tokenize=False, **chat_template_kwargs
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(prompt.messages) > 1:
        raise TrainingError(f"{where}: a conversation needs a chat template, and this tokenizer has none")
    return tokenizer(prompt.text)["input_ids"]


def batches(prompts: Iterable[TokenizedPrompt], batch_size: int, window: int = 16) -> list[list[TokenizedPrompt]]:
    """Split the prompts into batches of similar length to reduce padding: sorted within windows of `window` batches.

    The result depends only on the list, so a resumed run gets the same batches.
    """
    prompts, step = list(prompts), batch_size * window
    ordered = [
        p for at in range(0, len(prompts), step) for p in sorted(prompts[at : at + step], key=lambda p: len(p.ids))
    ]
    return [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
