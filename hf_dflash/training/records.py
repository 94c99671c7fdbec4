"""Training data: token ids of prompts and responses.

Owns: reading and checking the file that `hf-dflash data` writes, the split into training and held-out records, batches.

Does not know: models, states, tokenizers.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_dflash.draft.errors import TrainingError
from hf_dflash.files import read_jsonl


@dataclass(frozen=True)
class Record:
    """One training text. `name` tells two records apart."""

    name: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Records:
    """What a file gave: the usable records, and why others were left out."""

    kept: list[Record]
    too_short: int
    cut: int

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all kept records."""
        return sum(map(len, self.kept))


def read_records(path: str | Path, *, block_size: int, max_length: int, vocab_size: int) -> Records:
    """Read `{"prompt_ids": [...], "response_ids": [...]}` lines.

    Responses are cut so that a record has at most `max_length` tokens; a response shorter than a block is left out,
    since a block could not be filled from it.

    Raises:
        TrainingError: no file, no line, a line without token ids, a token beyond the vocabulary, or nothing usable.
    """
    if not Path(path).is_file():
        raise TrainingError(
            f"{path} does not exist: training reads the file of token ids that `hf-dflash data --out` writes"
        )
    kept, short, cut, number = [], 0, 0, 0
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        prompt, response = (_token_ids(row, key, where, vocab_size) for key in ("prompt_ids", "response_ids"))
        room = max_length - len(prompt)
        cut += len(response) > room
        response = response[: max(0, room)]
        if len(response) < block_size:
            short += 1
        else:
            kept.append(Record(str(row.get("key", number)), tuple(prompt), tuple(response)))
    if not number:
        raise TrainingError(f"{path} is empty: expected one JSON object of token ids per line")
    if not kept:
        raise TrainingError(
            f"{path}: none of {short} responses has the {block_size} tokens of a block within max_length {max_length}; "
            "regenerate longer responses, or lower block_size"
        )
    return Records(kept, short, cut)


def _rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from read_jsonl(path)
    except ValueError as error:
        raise TrainingError(str(error)) from error


def _token_ids(row: dict[str, Any], key: str, where: str, vocab_size: int) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise TrainingError(
            f"{where}: `{key}` must be a list of token ids; found {str(ids)[:60]!r} among the keys {sorted(row)}. "
            "Make the file with `hf-dflash data`"
        )
    beyond = [token for token in ids if not 0 <= token < vocab_size]
    if beyond:
        raise TrainingError(f"{where}: token {beyond[0]} in `{key}` is outside the target's vocabulary of {vocab_size}")
    return ids


def split(records: list[Record], held_out: int, seed: int) -> tuple[list[Record], list[Record]]:
    """Training and held-out records: `held_out` of them drawn at random, the same for the same seed.

    Raises:
        TrainingError: nothing would be left to train on.
    """
    if held_out >= len(records):
        raise TrainingError(
            f"{held_out} records are to be held out, but there are only {len(records)}: lower `held_out`"
        )
    chosen = set(random.Random(seed).sample(range(len(records)), held_out))
    train = [record for index, record in enumerate(records) if index not in chosen]
    return train, [records[index] for index in sorted(chosen)]


def response_token_counts(records: Sequence[Record], vocab_size: int) -> torch.LongTensor:
    """`(vocab_size,)` how often each token occurs in the responses."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for record in records:
        counts += torch.bincount(torch.tensor(record.response_ids), minlength=vocab_size)
    return counts


class RecordDataset(Dataset):
    """Records by index, with cached target states where a cache is given (see `state_cache.CachedStates`)."""

    def __init__(self, records: Sequence[Record], states: Any = None):
        self.records = list(records)
        self._states = states

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        item = {"index": index, "prompt_length": len(record.prompt_ids), "ids": record.prompt_ids + record.response_ids}
        if self._states is not None:
            item["taps"], item["final"] = self._states[record.name]
        return item


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad on the right.

    Returns:
        `input_ids (batch, c)`, `lengths (batch,)`, `prompt_lengths (batch,)`, `indices (batch,)`, and where states are
        cached `taps (batch, c, taps * hidden)` and perhaps `final (batch, c, hidden)`.
    """
    lengths = torch.tensor([len(item["ids"]) for item in items])
    width = int(lengths.max())
    batch = {
        "input_ids": torch.zeros(len(items), width, dtype=torch.long),
        "lengths": lengths,
        "prompt_lengths": torch.tensor([item["prompt_length"] for item in items]),
        "indices": torch.tensor([item["index"] for item in items]),
    }
    for row, item in enumerate(items):
        batch["input_ids"][row, : lengths[row]] = torch.tensor(item["ids"])
    for name in ("taps", "final"):
        if items[0].get(name) is not None:
            batch[name] = torch.nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True)
    return batch


def save_split(path: Path, held_out: Sequence[Record]) -> None:
    """Write the names of the held-out records, so that whoever has the data can tell them apart."""
    path.write_text(json.dumps({"held_out": [record.name for record in held_out]}, indent=1) + "\n", encoding="utf-8")
