"""The files of a draft checkpoint: found, opened, and held against the network that they should fill.

Owns: where `config.json` and the safetensors lie (a folder or the Hub), what their headers say, and every problem that
can be told without reading a weight.

Does not know: what the values of a configuration mean (`layouts`), dtypes to run in, devices.
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
LISTED = 10

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a file's header gives it; `dtype` in safetensors' words ("BF16")."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass
class Checkpoint:
    """What the files of a draft say. `tensors` is keyed by published names; empty where there are no weights."""

    name: str
    raw: dict[str, Any]
    layout: Layout
    reading: Reading
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def config(self) -> DFlashConfig:
        """The canonical configuration.

        Raises:
            CheckpointError: listing all problems of configuration and weights.
        """
        if self.problems:
            raise CheckpointError(
                join_problems(f"{self.name} ({self.layout.description}) cannot be used", self.problems)
            )
        return DFlashConfig(**self.reading.values)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Canonical names to tensors on the CPU that still lie in the files: memory fills as they are read."""
        state = {}
        for file in dict.fromkeys(info.file for info in self.tensors.values()):
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name, info in self.tensors.items():
                    canonical = self.layout.rename(name)
                    if info.file == file and canonical is not None:
                        state[canonical] = opened.get_tensor(name)
        return state


def read_checkpoint(name_or_path: str | Path, **hub_options: Any) -> Checkpoint:
    """Reads configuration and headers, and collects what is wrong.

    Args:
        name_or_path: a folder, or the id of a repository on the Hub.
        hub_options: any of `HUB_OPTIONS`, as for `hf_hub_download`.

    Raises:
        CheckpointError: there is no readable `config.json`, or what it describes is no DFlash draft.
    """
    files = _Files(name_or_path, hub_options)
    raw = files.config()
    if files.has("mask_embedding.pt"):
        raise CheckpointError(
            f"{files.name} keeps its mask token's embedding in mask_embedding.pt: this is a MiMo draft, a relative of "
            "DFlash that is not supported yet. Use a DFlash or DFlash 2 draft."
        )
    tensors, problems = files.tensors()
    shapes = {name: info.shape for name, info in tensors.items()} if tensors else None
    layout, reading = read(raw, shapes)
    problems += reading.all_problems()
    checkpoint = Checkpoint(files.name, raw, layout, reading, tensors, problems)
    if tensors and not problems:
        problems += _misfits(DFlashConfig(**reading.values), layout, tensors)
    return checkpoint


def is_draft_checkpoint(name_or_path: str | Path, **hub_options: Any) -> bool:
    """Whether a folder or Hub repository holds a DFlash draft, or a relative that `load_draft` refuses by name.

    False also where nothing can be read: whoever loads it as an ordinary model finds out why.
    """
    try:
        raw = _Files(name_or_path, hub_options).config()
    except CheckpointError:
        return False
    return recognize(raw) is not None or unsupported_family(raw) is not None


class _Files:
    """Finds the files of one checkpoint in a folder or on the Hub."""

    def __init__(self, name_or_path: str | Path, hub_options: Mapping[str, Any]) -> None:
        self.name = str(name_or_path)
        self.subfolder = hub_options.get("subfolder") or ""
        self.folder = Path(name_or_path) / self.subfolder if Path(name_or_path).exists() else None
        self.hub_options = {key: value for key, value in hub_options.items() if value is not None}
        if self.folder is not None and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder. Give the folder that holds the draft's config.json.")

    def has(self, filename: str) -> bool:
        """Whether a file lies in the local folder; the Hub is not asked."""
        return self.folder is not None and (self.folder / filename).is_file()

    def find(self, filename: str) -> Path | None:
        """The local path of a file, downloaded if need be; None where the checkpoint has no such file."""
        if self.folder is not None:
            return self.folder / filename if self.has(filename) else None
        try:
            path = Path(hf_hub_download(self.name, filename, **self.hub_options))
        except EntryNotFoundError:
            return None
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            raise CheckpointError(
                f"{self.name} is neither a folder here nor a repository that can be reached on the Hub: {error}"
            ) from error
        commit = re.search(r"snapshots/([0-9a-f]{40})/", path.as_posix())
        if commit:
            # Whatever the revision was, all files come from the commit that the first came from.
            self.hub_options["revision"] = commit[1]
        return path

    def config(self) -> dict[str, Any]:
        path = self.find("config.json")
        if path is None:
            raise CheckpointError(f"{self.name} has no config.json. Give the folder or the Hub id of a DFlash draft.")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}). Download the checkpoint again.") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} holds a {type(raw).__name__}, not a configuration.")
        return raw

    def tensors(self) -> tuple[dict[str, TensorInfo], list[str]]:
        """All tensors by published name, and what is wrong with the files that hold them."""
        tensors: dict[str, TensorInfo] = {}
        paths, problems = self._weight_files()
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a dictionary
                        part = opened.get_slice(name)
                        tensors[name] = TensorInfo(tuple(part.get_shape()), part.get_dtype(), path)
            except (SafetensorError, OSError) as error:
                problems.append(
                    f"{path.name} cannot be read as safetensors ({error}; {path.stat().st_size} bytes): it is "
                    "truncated or damaged. Download it again."
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
        problems = [f"{_INDEX} lists files that are not there: {listed(missing)}."] if missing else []
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
            f"The weights are only there in pickled form ({listed(pickled)}), which can run any code when opened. "
            f"Only safetensors are read: convert them to {_WEIGHTS}."
        ]


def _misfits(config: DFlashConfig, layout: Layout, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Tensors that are missing, unexpected or of another shape than the network's, each kind in one sentence."""
    found: dict[str, TensorInfo] = {}
    problems = []
    for name, info in tensors.items():
        canonical = layout.rename(name)
        if canonical in found:
            problems.append(f"Two tensors of the checkpoint are `{canonical}`; one of them is `{name}`.")
        if canonical is not None:
            found[canonical] = info
    return [*problems, *shape_problems(config, {name: info.shape for name, info in found.items()})]


def shape_problems(config: DFlashConfig, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """How canonical tensor names and shapes differ from those of the network that a configuration describes."""
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
        ("unexpected (the network has no place for them)", unexpected),
        ("of another shape than the configuration says", misshaped),
    )
    return [f"{_tensors(len(names))} {kind}: {listed(names)}." for kind, names in kinds if names]


def has_full_head(config: DFlashConfig) -> bool:
    """Whether the draft's own head covers the target's whole vocabulary, so that its ids need no mapping."""
    return config.draft_vocab_size is not None and config.draft_vocab_size == config.vocab_size


def _tensors(count: int) -> str:
    return "1 tensor is" if count == 1 else f"{count} tensors are"


def listed(names: list[str]) -> str:
    """At most `LISTED` names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
