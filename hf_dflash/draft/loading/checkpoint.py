"""Finds and opens the files of a draft checkpoint, in a folder or on the Hub, and checks them against the network.

Reports every problem that can be detected without reading a weight. What the configuration's values mean is left to
`layouts`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, list_repo_files
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from hf_dflash.draft.configuration_dflash import DFlashConfig, join_problems
from hf_dflash.draft.errors import CheckpointError
from hf_dflash.draft.layouts import Layout, Reading, read, recognize, unsupported_family
from hf_dflash.draft.modeling_dflash import DFlashDraftModel

HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "subfolder")
MAX_LISTED = 10

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor according to its file's header; `dtype` is safetensors' name ("BF16")."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass
class Checkpoint:
    """The contents of a draft's files. `tensors` is keyed by published names; empty if there are no weights."""

    name: str
    raw: dict[str, Any]
    layout: Layout
    reading: Reading
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

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

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return canonical names to memory-mapped tensors on the CPU: memory fills as they are read."""
        state = {}
        for file in dict.fromkeys(info.file for info in self.tensors.values()):
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name, info in self.tensors.items():
                    canonical = self.layout.rename(name)
                    if info.file == file and canonical is not None:
                        state[canonical] = opened.get_tensor(name)
        return state


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
    checkpoint = Checkpoint(files.name, raw, layout, reading, tensors, problems)
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
    """The files of one checkpoint, in a folder or on the Hub."""

    def __init__(self, name_or_path: str | Path, hub_options: Mapping[str, Any]) -> None:
        self.name = str(name_or_path)
        self.subfolder = hub_options.get("subfolder") or ""
        self.folder = Path(name_or_path) / self.subfolder if Path(name_or_path).exists() else None
        self.hub_options = {key: value for key, value in hub_options.items() if value is not None}
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
        except EntryNotFoundError:
            return None
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            raise CheckpointError(
                f"{self.name} is neither a local folder nor a reachable Hub repository: {error}"
            ) from error
        commit = re.search(r"snapshots/([0-9a-f]{40})/", path.as_posix())
        if commit:
            # Pin all further files to the commit of the first one.
            self.hub_options["revision"] = commit[1]
        return path

    def config(self) -> dict[str, Any]:
        path = self.find("config.json")
        if path is None:
            raise CheckpointError(f"{self.name} has no config.json. Pass the folder or the Hub id of a DFlash draft.")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}). Download the checkpoint again.") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} contains a {type(raw).__name__}, not a configuration.")
        return raw

    def tensors(self) -> tuple[dict[str, TensorInfo], list[str]]:
        """Return all tensors by published name, and the problems of the files that hold them."""
        tensors: dict[str, TensorInfo] = {}
        paths, problems = self._weight_files()
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a dictionary
                        tensor = opened.get_slice(name)
                        tensors[name] = TensorInfo(tuple(tensor.get_shape()), tensor.get_dtype(), path)
            except (SafetensorError, OSError) as error:
                problems.append(
                    f"{path.name} cannot be read as safetensors ({error}; {path.stat().st_size} bytes): it is "
                    "truncated or corrupted. Download it again."
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
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return [], [f"{_INDEX} is not a valid index ({error!r}). Download the checkpoint again."]
        found = {name: self.find(name) for name in names}
        missing = [name for name, path in found.items() if path is None]
        problems = [f"{_INDEX} lists missing files: {format_names(missing)}."] if missing else []
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


def shape_problems(config: DFlashConfig, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe how canonical tensor names and shapes differ from those of the network for a configuration."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(config).state_dict().items()}
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


def _tensors(count: int) -> str:
    return "1 tensor is" if count == 1 else f"{count} tensors are"


def format_names(names: list[str]) -> str:
    """Format at most `MAX_LISTED` names and the number of the rest."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
