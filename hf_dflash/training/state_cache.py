"""Target states cached on disk, so that several epochs run the target only once.

A cache is a folder of memory-mapped shards `shard-00000.safetensors`, ... and an `index.json` that is written last and
maps each record name to shard, first row and number of rows. A shard holds `taps (rows, taps * hidden)` and optionally
`final (rows, hidden)` in bfloat16.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_dflash.draft.errors import TrainingError
from hf_dflash.files import atomic_path, atomic_write
from hf_dflash.training.records import Record
from hf_dflash.training.states import StateCapture

BYTES_PER_VALUE = 2  # bfloat16


def cache_bytes(num_tokens: int, taps_width: int, final_width: int) -> int:
    """Return the size on disk of the states of `num_tokens` tokens, in bytes."""
    return num_tokens * (taps_width + final_width) * BYTES_PER_VALUE


def build_state_cache(
    folder: str | Path,
    records: Sequence[Record],
    capture: StateCapture,
    description: dict[str, Any],
    *,
    batch_size: int = 8,
    rows_per_shard: int = 65536,
    on_batch: Callable[[int], None] | None = None,
) -> Path:
    """Capture the states of every record, or return immediately if `folder` already holds them.

    Args:
        description: what the states depend on besides the records (target, taps, with or without last states). It is
            stored, and compared when the folder is reused.
        on_batch: called with the number of records done.

    Raises:
        TrainingError: the folder holds different states, or there is not enough disk space.
    """
    folder = Path(folder)
    index_path = folder / "index.json"
    expected = {"description": description, "records": [record.name for record in records]}
    if index_path.exists():
        stored = json.loads(index_path.read_text(encoding="utf-8"))
        if stored["description"] != description or set(expected["records"]) - set(stored["records"]):
            raise TrainingError(
                f"{folder} holds different target states: {stored['description']}, {len(stored['records'])} records; "
                f"expected {description}, {len(records)} records. Choose another states_dir, or delete the folder"
            )
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk_space(folder, records, description)
    entries: dict[str, list[int]] = {}
    shard, pending, rows = 0, [], 0
    ordered = sorted(records, key=len)
    for at in range(0, len(ordered), batch_size):
        batch = ordered[at : at + batch_size]
        for record, states in zip(batch, _capture(batch, capture), strict=True):
            entries[record.name] = [shard, rows, len(record)]
            pending.append(states)
            rows += len(record)
        if rows >= rows_per_shard or at + batch_size >= len(ordered):
            _write_shard(folder, shard, pending)
            shard, pending, rows = shard + 1, [], 0
        if on_batch is not None:
            on_batch(min(at + batch_size, len(ordered)))
    atomic_write(index_path, json.dumps({"description": description, "records": entries}))
    return folder


def _check_disk_space(folder: Path, records: Sequence[Record], description: dict[str, Any]) -> None:
    tokens = sum(map(len, records))
    needed = cache_bytes(tokens, description["taps_width"], description["final_width"])
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TrainingError(
            f"the target states of {tokens:,} tokens need {needed / 1e9:.2f} GB, but {folder} has only "
            f"{free / 1e9:.2f} GB free; use states: online, fewer records or another states_dir"
        )


def _capture(batch: Sequence[Record], capture: StateCapture) -> list[dict[str, torch.Tensor]]:
    """Capture the unpadded states of each record, on the CPU in bfloat16."""
    ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
    for row, record in enumerate(batch):
        ids[row, : len(record)] = torch.tensor(record.prompt_ids + record.response_ids)
    states = capture(ids)
    named = {"taps": states.taps} | ({} if states.final is None else {"final": states.final})
    return [
        {name: values[row, : len(record)].to("cpu", torch.bfloat16) for name, values in named.items()}
        for row, record in enumerate(batch)
    ]


def _write_shard(folder: Path, shard: int, pending: list[dict[str, torch.Tensor]]) -> None:
    path = folder / f"shard-{shard:05d}.safetensors"
    try:
        with atomic_path(path) as partial:
            save_file({name: torch.cat([states[name] for states in pending]) for name in pending[0]}, partial)
    except Exception as error:
        raise TrainingError(f"writing {path} failed ({error}); is the disk full?") from error


class CachedStates:
    """States by record name, read on demand from the memory-mapped shards."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._entries: dict[str, list[int]] = json.loads((self._folder / "index.json").read_text(encoding="utf-8"))[
            "records"
        ]
        self._files: dict[int, Any] = {}

    def __getitem__(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `taps (tokens, taps * hidden)` and `final (tokens, hidden)` or None, in bfloat16."""
        shard, first, rows = self._entries[name]
        if shard not in self._files:
            self._files[shard] = safe_open(self._folder / f"shard-{shard:05d}.safetensors", framework="pt")
        file = self._files[shard]
        read = lambda key: file.get_slice(key)[first : first + rows]  # noqa: E731
        return read("taps"), read("final") if "final" in file.keys() else None  # noqa: SIM118

    def __getstate__(self) -> dict[str, Any]:
        """Drop open files: each data loader worker opens its own."""
        return {**self.__dict__, "_files": {}}
