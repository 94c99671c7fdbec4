"""Training data: token ids of prompts and responses.

Reads and checks the file written by `hf-dflash data`, splits it into training and held-out records, finds the records
of a resumed run, and collates batches.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_dflash.draft.errors import TrainingError
from hf_dflash.files import atomic_write, read_jsonl


@dataclass(frozen=True)
class Record:
    """One prompt and response. `name` is the key or the number of its line; several responses may have the same."""

    name: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @cached_property
    def digest(self) -> str:
        """Hash of the token ids, which identifies the record: the same in every process and in every file."""
        return hashlib.sha256(json.dumps([self.prompt_ids, self.response_ids]).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Records:
    """The usable records of a file, and how many were dropped or truncated."""

    kept: list[Record]
    too_short: int
    truncated: int

    @property
    def num_tokens(self) -> int:
        """Total prompt and response tokens of the kept records."""
        return sum(map(len, self.kept))


def read_records(path: str | Path, *, block_size: int, max_length: int, vocab_size: int) -> Records:
    """Read `{"prompt_ids": [...], "response_ids": [...]}` lines.

    Responses are truncated so that a record has at most `max_length` tokens. A response shorter than a block is
    dropped, since it cannot fill one.

    Raises:
        TrainingError: the file is missing or empty, a line has no token ids, a token is out of range, or no record is
            usable.
    """
    if not Path(path).is_file():
        raise TrainingError(
            f"{path} does not exist: training needs the file of token ids written by `hf-dflash data --out`"
        )
    kept, too_short, truncated, number = [], 0, 0, 0
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        prompt, response = (_token_ids(row, key, where, vocab_size) for key in ("prompt_ids", "response_ids"))
        max_response = max_length - len(prompt)
        truncated += len(response) > max_response
        response = response[: max(0, max_response)]
        if len(response) < block_size:
            too_short += 1
        else:
            kept.append(Record(str(row.get("key", number)), tuple(prompt), tuple(response)))
    if not number:
        raise TrainingError(f"{path} is empty: expected one JSON object of token ids per line")
    if not kept:
        raise TrainingError(
            f"{path}: none of the {too_short} responses fills a block of {block_size} tokens within max_length "
            f"{max_length}; regenerate longer responses, or lower block_size"
        )
    return Records(kept, too_short, truncated)


def _rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from read_jsonl(path)
    except ValueError as error:
        raise TrainingError(str(error)) from error


def _token_ids(row: dict[str, Any], key: str, where: str, vocab_size: int) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise TrainingError(
            f"{where}: `{key}` must be a list of token ids; found {str(ids)[:60]!r} in a row with the keys "
            f"{sorted(row)}. Create the file with `hf-dflash data`"
        )
    out_of_range = [token for token in ids if not 0 <= token < vocab_size]
    if out_of_range:
        raise TrainingError(
            f"{where}: token {out_of_range[0]} in `{key}` is outside the target's vocabulary of {vocab_size}"
        )
    return ids


def split(records: list[Record], held_out: int, seed: int) -> tuple[list[Record], list[Record]]:
    """Split into training and held-out records, holding out prompts at random (deterministic given the seed).

    All responses to one prompt are on the same side, so more than `held_out` records are held out if the last prompt
    chosen has several responses.

    Raises:
        TrainingError: no records would be left to train on.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, record in enumerate(records):
        by_prompt.setdefault(record.prompt_ids, []).append(index)
    prompts = list(by_prompt.values())
    chosen: set[int] = set()
    for at in random.Random(seed).sample(range(len(prompts)), min(held_out, len(prompts))):
        if len(chosen) < held_out:
            chosen.update(prompts[at])
    if len(chosen) == len(records):
        raise TrainingError(
            f"cannot hold out {held_out} records: there are only {len(records)}, to {len(prompts)} prompts, and all "
            "responses to a prompt are held out together, so none would be left to train on; lower `held_out`"
        )
    train = [record for index, record in enumerate(records) if index not in chosen]
    return train, [records[index] for index in sorted(chosen)]


def response_token_counts(records: Sequence[Record], vocab_size: int) -> torch.LongTensor:
    """Count how often each token occurs in the responses, as `(vocab_size,)`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for record in records:
        counts += torch.bincount(torch.tensor(record.response_ids), minlength=vocab_size)
    return counts


class RecordDataset(Dataset):
    """Records by index, with their target states if a cache is given (see `state_cache.CachedStates`)."""

    def __init__(self, records: Sequence[Record], states: Any = None):
        self.records = list(records)
        self._states = states

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        item = {"index": index, "prompt_length": len(record.prompt_ids), "ids": record.prompt_ids + record.response_ids}
        if self._states is not None:
            item["taps"], item["final"] = self._states[record.digest]
        return item


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate a batch, padded on the right.

    Returns:
        `input_ids (batch, c)`, `lengths (batch,)`, `prompt_lengths (batch,)`, `indices (batch,)`, and with cached
        states `taps (batch, c, taps * hidden)` and, if stored, `final (batch, c, hidden)`.
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


def save_split(path: Path, records: Sequence[Record], held_out: Sequence[Record]) -> None:
    """Write the names of the held-out records, and what a resumed run needs to find the run's records in the data."""
    values = {
        "held_out": [record.name for record in held_out],
        "records": len(records),
        "records_digest": _digest(records),
    }
    atomic_write(path, json.dumps(values, indent=1) + "\n")


def records_of_run(path: Path, records: Records, data: str | Path) -> Records:
    """Return the records of the run that wrote `path`: a data file may have grown since, but not changed otherwise.

    Raises:
        TrainingError: the run's records are not the first ones of the data, or `path` does not have what is needed.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        count, digest = int(stored["records"]), stored["records_digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"--resume: {path} does not record what the run was started with ({type(error).__name__}: {error}), "
            "so the data cannot be checked; start a new run, with `warm_start` set to the latest checkpoint"
        ) from error
    if len(records.kept) < count or _digest(records.kept[:count]) != digest:
        raise TrainingError(
            f"--resume: the run was started with {count} records, and these are not the first of the "
            f"{len(records.kept)} that {data} has now, so held-out texts could end up in training; restore the file "
            "(it may grow at its end), or start a new run"
        )
    return replace(records, kept=records.kept[:count])


def _digest(records: Sequence[Record]) -> str:
    """Hash records in their order."""
    return hashlib.sha256("".join(record.digest for record in records).encode()).hexdigest()[:32]
