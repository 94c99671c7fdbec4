"""Finds and opens the files of a draft checkpoint, in a folder or on the Hub, and checks them against the network.

Reports every problem that can be detected without reading a weight. What the configuration's values mean is left to
`layouts`.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, list_repo_files
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import local_torch_dtype

from hf_dflash.draft.configuration_dflash import DFlashConfig, format_value, join_problems
from hf_dflash.draft.errors import CheckpointError, DFlashError
from hf_dflash.draft.layouts import Layout, Reading, read, recognize, unsupported_family
from hf_dflash.draft.modeling_dflash import DFlashDraftModel

HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "subfolder")
MAX_LISTED = 10
# safetensors' names of the dtypes that weights may be stored in, and `d2t`.
STORED_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F64": torch.float64}
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class TensorInfo:
    """One tensor according to its file's header; `dtype` is safetensors' name ("BF16")."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass
class Checkpoint:
    """The contents of a draft's files. `tensors` is keyed by published names; empty if there are no weights, for which
    `no_weights` is the message.
    """

    name: str
    raw: dict[str, Any]
    layout: Layout
    reading: Reading
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    no_weights: str = ""

    def config(self) -> DFlashConfig:
        """Return the canonical configuration.

        Raises:
            CheckpointError: lists all problems of configuration and weights.
        """
        if self.problems:
            raise CheckpointError(
                join_problems(f"{self.name} ({self.layout.description}) cannot be used", self.problems)
            )
        return DFlashConfig(**self.reading.values)

    def used_tensors(self) -> dict[str, str]:
        """Return the published names of the tensors that a draft needs, and their canonical names."""
        renamed = {name: self.layout.rename(name) for name in self.tensors}
        return {name: canonical for name, canonical in renamed.items() if canonical is not None}

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return canonical names to memory-mapped tensors on the CPU, each read once to check its values.

        Args:
            dtype: what the draft will run in. The tensors are returned in the stored one.

        Raises:
            CheckpointError: names the tensors with NaN, with infinite values, or with values too large for `dtype`.
        """
        state: dict[str, torch.Tensor] = {}
        unusable = []
        used = self.used_tensors()
        for file in dict.fromkeys(self.tensors[name].file for name in used):
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name, canonical in used.items():
                    if self.tensors[name].file == file:
                        state[canonical] = tensor = opened.get_tensor(name)
                        if tensor.is_floating_point() and not _fits(tensor, dtype):
                            unusable.append(name)
        if unusable:
            raise CheckpointError(
                f"{self.name} ({self.layout.description}) cannot be used: {_tensors(len(unusable), 'has', 'have')} "
                f"values that are NaN, infinite or too large for {dtype}: {format_names(unusable)}. The file is "
                "damaged, or training diverged: download it again or ask the draft's author."
            )
        return state


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether every value is finite in `dtype`. One pass over the file's pages, without a copy."""
    if not tensor.numel():
        return True
    limit = torch.finfo(dtype).max
    # A finite sum has only finite terms, and a sum takes half the time of an exact check, about that of reading.
    if torch.finfo(tensor.dtype).max <= limit and tensor.sum().isfinite():
        return True
    low, high = torch.aminmax(tensor)
    # A NaN makes both NaN, and its comparisons are false.
    return -limit <= low.item() and high.item() <= limit


def read_checkpoint(name_or_path: str | Path, **hub_options: Any) -> Checkpoint:
    """Read configuration and headers, and collect their problems.

    Args:
        name_or_path: a folder, or the id of a Hub repository.
        hub_options: any of `HUB_OPTIONS`, as for `hf_hub_download`.

    Raises:
        CheckpointError: there is no readable `config.json`, or it does not describe a DFlash draft.
    """
    files = _Files(name_or_path, hub_options)
    raw = files.config()
    if files.has("mask_embedding.pt"):
        raise CheckpointError(
            f"{files.name} has its mask token's embedding in mask_embedding.pt: this is a MiMo draft, a relative of "
            "DFlash that is not supported yet. Use a DFlash or DFlash 2 draft."
        )
    tensors, problems = files.tensors()
    shapes = {name: info.shape for name, info in tensors.items()} if tensors else None
    layout, reading = read(raw, shapes)
    problems += reading.all_problems()
    problems += _dtype_problems(layout, tensors)
    checkpoint = Checkpoint(files.name, raw, layout, reading, tensors, problems, files.no_weights())
    if tensors and not problems:
        problems += _tensor_problems(DFlashConfig(**reading.values), layout, tensors)
    return checkpoint


def is_draft_checkpoint(name_or_path: str | Path, **hub_options: Any) -> bool:
    """Return whether a folder or Hub repository holds a DFlash draft, or a relative that `load_draft` rejects by name.

    Also False if nothing can be read: loading it as an ordinary model then reports why.
    """
    try:
        raw = _Files(name_or_path, hub_options).config()
    except CheckpointError:
        return False
    return recognize(raw) is not None or unsupported_family(raw) is not None


class _Files:
    """The files of one checkpoint, in a folder or on the Hub.

    unreachable: why the Hub could not be asked for a file that is not in the local cache; "" if it never happened.
    """

    def __init__(self, name_or_path: str | Path, hub_options: Mapping[str, Any]) -> None:
        if not isinstance(name_or_path, (str, os.PathLike)) or not str(name_or_path):
            found = "an empty name" if isinstance(name_or_path, str) else f"a {type(name_or_path).__name__}"
            raise CheckpointError(
                f"A draft is loaded from a folder or a Hub repository, found {found}. Pass its path or Hub id; a model "
                "that is already loaded goes to `generate` as it is."
            )
        self.name = str(name_or_path)
        self.subfolder = hub_options.get("subfolder") or ""
        self.folder = Path(name_or_path) / self.subfolder if _exists(Path(name_or_path)) else None
        self.hub_options = {key: value for key, value in hub_options.items() if value is not None}
        self.unreachable = ""
        if self.folder is not None and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder. Pass the folder that has the draft's config.json.")

    def has(self, filename: str) -> bool:
        """Return whether a file is in the local folder; the Hub is not queried."""
        return self.folder is not None and (self.folder / filename).is_file()

    def find(self, filename: str) -> Path | None:
        """Return the local path of a file, downloaded if needed, or None if the checkpoint has no such file."""
        if self.folder is not None:
            return self.folder / filename if self.has(filename) else None
        try:
            path = Path(hf_hub_download(self.name, filename, **self.hub_options))
        except LocalEntryNotFoundError as error:
            # Not in the cache. Whether the repository has it is unknown.
            self.unreachable = str(error)
            return None
        except EntryNotFoundError:
            return None
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            raise self._not_found(str(error)) from error
        commit = re.search(r"snapshots/([0-9a-f]{40})/", path.as_posix())
        if commit:
            # Pin all further files to the commit of the first one.
            self.hub_options["revision"] = commit[1]
        return path

    def _not_found(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.name} is neither a local folder nor a reachable Hub repository: {reason}")

    def config(self) -> dict[str, Any]:
        path = self.find("config.json")
        if path is None and self.unreachable:
            raise self._not_found(self.unreachable)
        if path is None:
            raise CheckpointError(f"{self.name} has no config.json. Pass the folder or the Hub id of a DFlash draft.")
        raw = _read_json(path)
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} contains a {type(raw).__name__}, not a configuration.")
        return raw

    def no_weights(self) -> str:
        """Return the message for a checkpoint without weight files."""
        if self.unreachable:
            return f"The weights are not in the local cache, and the Hub is not reachable: {self.unreachable}"
        return f"The checkpoint has a config.json but no weights: {_WEIGHTS} is missing."

    def tensors(self) -> tuple[dict[str, TensorInfo], list[str]]:
        """Return all tensors by published name, and the problems of the files that hold them."""
        tensors: dict[str, TensorInfo] = {}
        repeated: list[str] = []
        paths, problems = self._weight_files()
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a dictionary
                        if name in tensors:
                            repeated.append(f"{name} ({tensors[name].file.name} and {path.name})")
                        tensor = opened.get_slice(name)
                        tensors[name] = TensorInfo(tuple(tensor.get_shape()), tensor.get_dtype(), path)
            except (SafetensorError, OSError) as error:
                problems.append(
                    f"{path.name} cannot be read as safetensors ({error}; {path.stat().st_size} bytes): it is "
                    "truncated or corrupted. Download it again."
                )
        if repeated:
            problems.append(
                f"{_tensors(len(repeated))} in more than one file, and only one can be meant: "
                f"{format_names(repeated)}. Download the checkpoint again."
            )
        return tensors, problems

    def _weight_files(self) -> tuple[list[Path], list[str]]:
        whole = self.find(_WEIGHTS)
        if whole is not None:
            return [whole], []
        index = self.find(_INDEX)
        if index is None:
            return [], self._pickles()
        try:
            names = _shard_names(_read_json(index, _unique_keys))
        except CheckpointError as error:
            return [], [str(error)]
        found = {name: self.find(name) for name in names}
        missing = [name for name, path in found.items() if path is None]
        reason = f" (not in the cache, and the Hub is not reachable: {self.unreachable})" if self.unreachable else ""
        problems = [f"{_INDEX} lists missing files: {format_names(missing)}{reason}."] if missing else []
        return [path for path in found.values() if path is not None], problems

    def _pickles(self) -> list[str]:
        if self.folder is not None:
            names = [path.name for path in self.folder.iterdir()]
        else:
            try:
                options = {key: self.hub_options[key] for key in ("revision", "token") if key in self.hub_options}
                names = list_repo_files(self.name, **options)
            except (HfHubHTTPError, OSError):
                return []
        pickled = sorted(name for name in names if name.endswith(_PICKLED))
        if not pickled:
            return []
        return [
            f"The weights are only available as pickles ({format_names(pickled)}), which can run any code when loaded. "
            f"Only safetensors are supported: convert them to {_WEIGHTS}."
        ]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # Too long for a path, or with a null character.
        return False


def _read_json(path: Path, pairs_hook: Callable[[list[tuple[str, Any]]], dict] | None = None) -> Any:
    """Parse a JSON file.

    Raises:
        CheckpointError: it cannot be read, is not JSON, or is nested more deeply than any configuration.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=pairs_hook)
        if _depth(parsed) > _MAX_DEPTH:
            raise RecursionError
    except RecursionError as error:
        raise CheckpointError(
            f"{path} is nested more than {_MAX_DEPTH} levels deep. Download the checkpoint again."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        # Not UTF-8, not JSON, or an integer of more than 4300 digits.
        raise CheckpointError(f"{path} is not valid JSON ({error}). Download the checkpoint again.") from error
    return parsed


def _depth(value: Any) -> int:
    """Return the levels of nesting of a parsed JSON value, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        containers = [entry for entry in level if isinstance(entry, (dict, list))]
        level = [e for outer in containers for e in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary of the index, in which no tensor may be listed twice."""
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise CheckpointError(
            f"{_INDEX} lists {format_names(repeated)} more than once, and only one file can be meant. Download the "
            "checkpoint again."
        )
    return dict(pairs)


def _shard_names(index: Any) -> list[str]:
    """Return the names of the weight files in a parsed index.

    Raises:
        CheckpointError: it is not an index, or names a file that is not next to it.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX} is not a valid index (it has no `weight_map`). Download the checkpoint again.")
    invalid = {format_value(name): name for name in weight_map.values() if not _is_file_name(name)}
    if invalid:
        raise CheckpointError(
            f"{_INDEX} is not a valid index: it may only name files in its own folder, such as "
            f"model-00001-of-00002.safetensors, found {format_names(list(invalid))}. Download the checkpoint again."
        )
    return sorted(set(weight_map.values()))


def _is_file_name(name: Any) -> bool:
    """Return whether a value is a plain file name on any system, and not a path."""
    plain = isinstance(name, str) and name.isascii() and name.isprintable() and 0 < len(name) <= 200
    return plain and not set(name) & set("/\\:") and bool(name.strip(". "))


def _dtype_problems(layout: Layout, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Describe tensors of the network that are stored in a dtype that has no meaning there."""
    wrong = []
    for name, info in tensors.items():
        canonical = layout.rename(name)
        if canonical is not None and info.dtype not in (_INTEGERS if canonical == "d2t" else STORED_DTYPES):
            wrong.append(f"{name} ({info.dtype})")
    if not wrong:
        return []
    return [
        f"{_tensors(len(wrong))} stored in a dtype that cannot be loaded: {format_names(wrong)}. Weights must be "
        f"{', '.join(STORED_DTYPES)} and `d2t` integers; quantized values mean nothing without their scales. Use the "
        "bfloat16 draft."
    ]


def _tensor_problems(config: DFlashConfig, layout: Layout, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Describe missing, unexpected and misshaped tensors, each kind in one sentence."""
    found: dict[str, TensorInfo] = {}
    problems = []
    for name, info in tensors.items():
        canonical = layout.rename(name)
        if canonical in found:
            problems.append(f"Two tensors of the checkpoint map to `{canonical}`; one of them is `{name}`.")
        if canonical is not None:
            found[canonical] = info
    return [*problems, *shape_problems(config, {name: info.shape for name, info in found.items()})]


def build_on_meta(config: DFlashConfig) -> DFlashDraftModel:
    """Build the network without memory for its weights, whatever the process's default dtype is.

    Raises:
        CheckpointError: the values of the configuration do not make a network.
    """
    try:
        with torch.device("meta"), local_torch_dtype(torch.float32):
            return DFlashDraftModel(config)
    except DFlashError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The network cannot be built from this configuration ({type(error).__name__}: {error}). Check its RoPE "
            "values first, or get the configuration from the draft's author."
        ) from error


def shape_problems(config: DFlashConfig, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe how canonical tensor names and shapes differ from those of the network for a configuration."""
    try:
        network = build_on_meta(config)
    except CheckpointError as error:
        return [str(error)]
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    missing = [name for name in expected if name not in found and not (name == "d2t" and has_full_head(config))]
    unexpected = [name for name in found if name not in expected]
    misshaped = [
        f"{name} {tuple(found[name])} instead of {expected[name]}"
        for name in expected
        if name in found and tuple(found[name]) != expected[name]
    ]
    kinds = (
        ("missing", missing),
        ("unexpected (not part of the network)", unexpected),
        ("of the wrong shape for this configuration", misshaped),
    )
    return [f"{_tensors(len(names))} {kind}: {format_names(names)}." for kind, names in kinds if names]


def has_full_head(config: DFlashConfig) -> bool:
    """Return whether the draft's own head covers the target's full vocabulary, so that its ids need no mapping."""
    return config.draft_vocab_size is not None and config.draft_vocab_size == config.vocab_size


def _tensors(count: int, one: str = "is", several: str = "are") -> str:
    return f"1 tensor {one}" if count == 1 else f"{count} tensors {several}"


def format_names(names: list[str]) -> str:
    """Format at most `MAX_LISTED` names and the number of the rest."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
