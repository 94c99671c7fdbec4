"""Target states cached on disk, so that several epochs run the target only once.

A cache is a folder of memory-mapped shards `shard-00000.safetensors`, ... and an `index.json` that is written last and
maps the digest of each record (a hash of its token ids) to shard, first row and number of rows. A shard holds
`taps (rows, taps * hidden)` and optionally `final (rows, hidden)` in bfloat16. The index also describes the target that
the states come from (see `describe_states`), so that they are never taken for those of another target or text.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from hf_dflash.draft.errors import TrainingError
from hf_dflash.files import atomic_path, atomic_write
from hf_dflash.target.target import Target
from hf_dflash.training.records import Record
from hf_dflash.training.states import StateCapture

BYTES_PER_VALUE = 2  # bfloat16
SHARD_METADATA = {"made_by": "hf_dflash.training"}
"""Metadata of every shard: only files with it are ever overwritten."""


def cache_bytes(num_tokens: int, taps_width: int, final_width: int) -> int:
    """Return the size on disk of the states of `num_tokens` tokens, in bytes."""
    return num_tokens * (taps_width + final_width) * BYTES_PER_VALUE


def describe_states(target: Target, layer_ids: Sequence[int], taps_width: int, final_width: int) -> dict[str, Any]:
    """Describe what target states depend on besides the text; JSON values that are equal in every process.

    The weights are compared by their values, since a path or a Hub ID stays the same when the model behind it changes.

    Args:
        layer_ids: the tapped layers.
        taps_width: values per token in the taps.
        final_width: values per token in the last hidden state, 0 if it is not stored.
    """
    return {
        "target": target.name,
        "dtype": str(target.dtype),
        "config": config_fingerprint(target.model.config),
        "weights": weights_fingerprint(target.model),
        "taps": list(layer_ids),
        "taps_width": taps_width,
        "final_width": final_width,
    }


def config_fingerprint(config: Any) -> str:
    """Hash a model's configuration, without its name and the version and dtype that it was saved with."""
    ignored = {"transformers_version", "dtype", "torch_dtype", "architectures"}

    def relevant(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            str(key): relevant(value)
            for key, value in values.items()
            if key not in ignored and not str(key).startswith("_")
        }

    text = json.dumps(relevant(config.to_diff_dict()), sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> str:
    """Hash every weight of a model: name, shape, dtype and a checksum of the values, the same on every device.

    Offloaded weights are loaded one module at a time.

    Raises:
        TrainingError: a weight has no values to compare (it is on the meta device).
    """
    from accelerate.utils import align_module_device

    result = hashlib.sha256()
    for prefix, module in model.named_modules():
        with align_module_device(module):
            for name, tensor in _own_weights(module):
                sums = _checksums(tensor, f"{prefix}.{name}")
                result.update(f"{prefix}.{name} {tuple(tensor.shape)} {tensor.dtype} {sums}\n".encode())
    return result.hexdigest()[:32]


def _own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module itself saves; others (rotary frequencies) may change in use."""
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def _checksums(tensor: torch.Tensor, name: str, chunk: int = 2**22) -> list[int]:
    """Return a checksum per chunk: the sum of the values' bits as integers, each times its position, modulo 2**64."""
    if hasattr(tensor, "full_tensor"):  # sharded over several processes
        tensor = tensor.full_tensor()
    if hasattr(tensor, "__tensor_flatten__"):  # quantized: a tensor made of other tensors
        parts = tensor.__tensor_flatten__()[0]
        return [value for part in parts for value in _checksums(getattr(tensor, part), f"{name}.{part}", chunk)]
    if tensor.is_meta:
        raise TrainingError(
            f"the target's {name} is on the meta device, so cached states cannot be told from those of other weights; "
            "use states: online, or load the target into memory"
        )
    values = tensor.detach().contiguous().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    position = torch.arange(1, min(chunk, values.numel()) + 1, device=values.device)
    sums = [(part.long() * position[: len(part)]).sum() for part in values.view(integers).split(chunk)]
    return torch.stack(sums).tolist()


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

    Records with the same token ids share one entry.

    Args:
        description: what the states depend on besides the records, as from `describe_states`. It is stored, and
            compared when the folder is reused.
        on_batch: called with the number of different records done.

    Raises:
        TrainingError: the folder holds different states or files of others, or there is not enough disk space.
    """
    folder = Path(folder)
    index_path = folder / "index.json"
    distinct = {record.digest: record for record in records}
    if index_path.exists():
        _check_index(folder, distinct, description)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _check_shards(folder)
    ordered = sorted(distinct.values(), key=len)
    _check_disk_space(folder, ordered, description)
    entries: dict[str, list[int]] = {}
    shard, pending, rows = 0, [], 0
    for at in range(0, len(ordered), batch_size):
        batch = ordered[at : at + batch_size]
        for record, states in zip(batch, _capture(batch, capture), strict=True):
            entries[record.digest] = [shard, rows, len(record)]
            pending.append(states)
            rows += len(record)
        if rows >= rows_per_shard or at + batch_size >= len(ordered):
            _write_shard(folder, shard, pending)
            shard, pending, rows = shard + 1, [], 0
        if on_batch is not None:
            on_batch(min(at + batch_size, len(ordered)))
    atomic_write(index_path, json.dumps({"description": description, "records": entries}))
    return folder


def _read_index(folder: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the description and the entries of a cache.

    Raises:
        TrainingError: `index.json` is not that of a cache.
    """
    path = folder / "index.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return dict(stored["description"]), dict(stored["records"])
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{path} is not the index of cached target states ({type(error).__name__}: {error}); choose another "
            "states_dir"
        ) from error


def _check_index(folder: Path, distinct: dict[str, Record], description: dict[str, Any]) -> None:
    """Check that the cache in `folder` has the states of these records and this target."""
    stored, entries = _read_index(folder)
    problems = [
        f"{name} {stored.get(name)!r} (now {description.get(name)!r})"
        for name in sorted(stored.keys() | description.keys())
        if stored.get(name) != description.get(name)
    ]
    missing = sum(digest not in entries for digest in distinct)
    if missing:
        problems.append(
            f"{missing} of the {len(distinct)} records are not among its {len(entries)} (by the token ids of prompt "
            "and response)"
        )
    if problems:
        raise TrainingError(
            f"{folder} holds different target states: {'; '.join(problems)}. Choose another states_dir, or delete the "
            "folder"
        )


def _check_shards(folder: Path) -> None:
    """Check that the shards in a folder without index are those of an interrupted run, so they may be overwritten."""
    for path in sorted(folder.glob("shard-*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except SafetensorError:
            metadata = {}
        if not SHARD_METADATA.items() <= metadata.items():
            raise TrainingError(
                f"{path} was not written by this version of hf_dflash and would be overwritten; choose another "
                "states_dir, or delete the file"
            )


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
    tensors = {name: torch.cat([states[name] for states in pending]) for name in pending[0]}
    try:
        with atomic_path(path) as partial:
            save_file(tensors, partial, metadata=SHARD_METADATA)
    except Exception as error:
        raise TrainingError(f"writing {path} failed ({error}); is the disk full?") from error


class CachedStates:
    """States by record digest, read on demand from the memory-mapped shards."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._entries = _read_index(self._folder)[1]
        self._files: dict[int, Any] = {}

    def __getitem__(self, digest: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `taps (tokens, taps * hidden)` and `final (tokens, hidden)` or None, in bfloat16."""
        shard, first, rows = self._entries[digest]
        if shard not in self._files:
            self._files[shard] = safe_open(self._folder / f"shard-{shard:05d}.safetensors", framework="pt")
        file = self._files[shard]
        read = lambda key: file.get_slice(key)[first : first + rows]  # noqa: E731
        return read("taps"), read("final") if "final" in file.keys() else None  # noqa: SIM118

    def __getstate__(self) -> dict[str, Any]:
        """Drop open files: each data loader worker opens its own."""
        return {**self.__dict__, "_files": {}}
