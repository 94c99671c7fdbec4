"""The settings of a training run, their checks and their YAML form.

`hf_dflash_cli.train` makes one command-line flag from each field.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import TrainingError
from hf_dflash.files import atomic_write

_LARGEST = {"int": 2**31 - 1, "float": 1e12}


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Declare a field with its help text and its limits.

    Args:
        limits: `choices`; or for numbers `minimum` and `maximum` (inclusive), `above` and `below` (exclusive). A field
            whose type allows it may be None besides.
    """
    return field(default=default, metadata={"help": help, **limits})


def setting_fields() -> list[Field]:
    """Return the fields of `TrainingSettings` that are settings, in order."""
    return [item for item in fields(TrainingSettings) if "help" in item.metadata]


def _remembers_given(cls: type) -> type:
    """Let a settings class record in `given` which settings it was created with, even if with their default value."""
    generated = cls.__init__

    @functools.wraps(generated)
    def create(self: Any, *args: Any, given: Any = None, **values: Any) -> None:
        generated(self, *args, **values)
        items = [item for item in fields(cls) if "help" in item.metadata]
        names = {*(item.name for item in items[: len(args)]), *values}
        for name in names:
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if given is not None:
            names = {*given, *(item.name for item in items if getattr(self, item.name) != item.default)}
        object.__setattr__(self, "given", frozenset(names))

    cls.__init__ = create
    return cls


@_remembers_given
@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run. Every field is a flag of `hf-dflash train` and a key of its YAML file."""

    target: str | None = setting(None, "Target model: Hub ID or local path.")
    data: str | None = setting(None, "Path to the JSONL file of token ids written by `hf-dflash data`.")
    out: str | None = setting(
        None, "Output directory for checkpoints, the draft, the report and the settings; new or empty."
    )

    version: int = setting(1, "DFlash version: 1, or 2 with convolutions and a candidate selector.", choices=(1, 2))
    layers: int = setting(5, "Number of draft layers.", minimum=1, maximum=1024)
    block_size: int = setting(16, "Number of tokens per block, including the anchor.", minimum=2, maximum=1024)
    taps: list[int] | None = setting(None, "Target layers to tap (0-based). Default: num_taps evenly spaced layers.")
    num_taps: int = setting(5, "Number of target layers to tap if `taps` is not set.", minimum=1)
    mask_token_id: int | None = setting(
        None, "Mask token for the positions to predict. Default: an unused token.", minimum=0
    )
    sliding_window: int | None = setting(
        None, "Sliding window size of the draft's attention. Default: full attention.", minimum=1
    )
    sliding_causal: bool = setting(True, "Whether sliding layers are causal within the block (DFlash 2: never).")
    intermediate_size: int | None = setting(
        None, "Intermediate size of the draft's MLP. Default: the target's.", minimum=1
    )
    num_attention_heads: int | None = setting(None, "Number of attention heads. Default: the target's.", minimum=1)
    num_key_value_heads: int | None = setting(None, "Number of key/value heads. Default: the target's.", minimum=1)
    head_dim: int | None = setting(None, "Dimension of the attention heads. Default: the target's.", minimum=2)
    rope_theta: float | None = setting(None, "Base of the rotary embeddings. Default: the target's.", above=0)
    conv_kernel_size: int = setting(2, "DFlash 2: kernel size of the convolutions, in tokens.", minimum=1)
    conv_group_size: int = setting(16, "DFlash 2: number of channels that share a dynamic kernel.", minimum=1)
    selector_rank: int = setting(64, "DFlash 2: rank of the selector's codebooks.", minimum=1)
    selector_top_k: int = setting(16, "DFlash 2: number of candidates per position.", minimum=1)
    initial_weights: str = setting(
        "target",
        "Initialization: target (copied from the target's last layers) or random.",
        choices=("target", "random"),
    )
    warm_start: str | None = setting(None, "Draft to start from, in any layout: Hub ID or local path.")

    anchors: int = setting(
        512, "Maximum number of blocks per sequence and step, at random response positions.", minimum=1
    )
    max_length: int = setting(3072, "Maximum sequence length in tokens; responses are truncated to it.", minimum=4)
    gamma: float | None = setting(
        None, "Decay of the position weights. Default: 7 for block 16, 5 for 10, 4 for 8.", above=0
    )
    weighting: str = setting(
        "decay", "Position weights: decay (exp(-(k-1)/gamma)) or d-pace.", choices=("decay", "d-pace")
    )
    d_pace_alpha: float = setting(0.5, "Smoothing factor of D-PACE, in (0, 1].", above=0, maximum=1)
    distillation: float = setting(
        0.0, "Weight of the KL divergence to the target's distribution, in [0, 1].", minimum=0, maximum=1
    )
    selector_weight: float = setting(1.0, "DFlash 2: weight of the selector loss.", minimum=0)
    loss_vocabulary: int | None = setting(
        None, "Compute the loss over this many frequent tokens (and the step's labels). Default: all.", minimum=2
    )
    loss_chunk: int = setting(1024, "Number of block positions whose logits are computed at a time.", minimum=1)
    states: str = setting(
        "online",
        "Target hidden states: online (a target forward each step) or cached (on disk).",
        choices=("online", "cached"),
    )
    states_dir: str | None = setting(None, "Directory of the cached states. Default: OUT/states.")

    epochs: float = setting(6.0, "Number of training epochs.", above=0)
    max_steps: int = setting(-1, "Number of training steps; overrides epochs if positive.", minimum=-1)
    batch_size: int = setting(1, "Batch size per device, in sequences.", minimum=1)
    accumulate: int = setting(1, "Number of gradient accumulation steps.", minimum=1)
    learning_rate: float = setting(6e-4, "Peak learning rate of AdamW.", minimum=0)
    warmup: float = setting(0.04, "Fraction of the steps for warmup, followed by cosine decay.", minimum=0, below=1)
    weight_decay: float = setting(0.01, "Weight decay of AdamW.", minimum=0)
    clip: float = setting(1.0, "Maximum gradient norm; 0 turns clipping off.", minimum=0)
    precision: str = setting(
        "auto",
        "fp32, bf16 (autocast over fp32 weights), or auto (bf16 on GPUs that support it).",
        choices=("auto", "fp32", "bf16"),
    )
    attention: str = setting(
        "sdpa",
        "Attention implementation of the draft: sdpa, flex_attention or eager.",
        choices=("sdpa", "flex_attention", "eager"),
    )
    seed: int = setting(0, "Random seed.", minimum=0, maximum=2**32 - 1)
    device: str | None = setting(None, "cpu to train on the CPU. Default: chosen by accelerate.")
    target_dtype: str = setting(
        "auto",
        "dtype of the target: auto, bfloat16, float32 or float16.",
        choices=("auto", "bfloat16", "float32", "float16"),
    )

    held_out: int = setting(32, "Number of records held out to measure acceptance.", minimum=0)
    evaluate_every: int = setting(500, "Number of steps between evaluations of acceptance.", minimum=1)
    save_every: int = setting(500, "Number of steps between checkpoints.", minimum=1)
    keep: int = setting(2, "Maximum number of checkpoints to keep.", minimum=1)
    log_every: int = setting(20, "Number of steps between log lines.", minimum=1)
    report_to: str = setting("none", "Integration to report metrics to: none, tensorboard, wandb, ...")
    final_prompts: int = setting(
        8, "Number of held-out prompts to measure tau with `generate` at the end; 0 to skip.", minimum=0
    )
    final_tokens: int = setting(256, "Number of new tokens per prompt for this measurement.", minimum=1)
    layout: str = setting(
        "canonical",
        "Layout of the finished draft: canonical, zlab or speculators.",
        choices=("canonical", "zlab", "speculators"),
    )
    trust_remote_code: bool = setting(False, "Allow custom code from the target's Hub repository.")

    given: frozenset[str] | None = field(default=None, repr=False, compare=False, kw_only=True)
    """Names of the settings that were given, also those with their default value. `dataclasses.replace` keeps it and
    adds what then differs from the default."""

    def check(self) -> "TrainingSettings":
        """Return the settings, or raise an error that lists every problem.

        Raises:
            TrainingError: a setting is missing, of the wrong type, out of range or not available on this machine.
        """
        problems = [f"`{name}` is missing" for name in ("target", "data", "out") if not getattr(self, name)]
        found = {item.name: _problem(item, getattr(self, item.name)) for item in setting_fields()}
        problems += [problem for problem in found.values() if problem]
        problems += self._contradictions({name for name, problem in found.items() if problem is None})
        if problems:
            raise TrainingError("invalid training settings: " + "; ".join(problems))
        return self

    def _contradictions(self, valid: set[str]) -> Iterator[str]:
        """Yield what is wrong with settings that are each in their range (the `valid` ones)."""
        if "max_steps" in valid and self.max_steps == 0:
            yield "`max_steps` must be at least 1, or -1 to train for `epochs`; found 0"
        taps = self.taps if "taps" in valid else None
        if taps is not None and (not taps or min(taps) < 0 or len(set(taps)) < len(taps)):
            yield f"`taps` must be one or more different layers, counted from 0; found {taps}"
        smallest = max(2, self.selector_top_k) if "selector_top_k" in valid else 2
        vocabulary = self.loss_vocabulary if "loss_vocabulary" in valid else None
        if vocabulary is not None and vocabulary < smallest:
            yield f"`loss_vocabulary` must be at least {smallest}; found {vocabulary}"
        if {"max_length", "block_size"} <= valid and not self.warm_start and self.max_length <= self.block_size:
            yield f"`max_length` must be above `block_size` ({self.block_size}); found {self.max_length}"
        if "head_dim" in valid and self.head_dim is not None and self.head_dim % 2:
            yield f"`head_dim` must be even, because RoPE rotates pairs of values; found {self.head_dim}"
        if "device" in valid:
            yield from _device_problems(self.device)
        if "report_to" in valid:
            yield from _report_problems(self.report_to)

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], where: str, flags: Mapping[str, Any] | None = None
    ) -> "TrainingSettings":
        """Create settings from a mapping, checking each value against its field's type.

        Args:
            values: settings by name. `given`, if there, lists those of them that are not merely written-out defaults.
            flags: settings that override `values`.

        Raises:
            TrainingError: unknown keys or values of the wrong type.
        """
        flags = flags or {}
        values = {**values, **flags}
        listed = values.pop("given", None)
        known = {item.name: item for item in setting_fields()}
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            raise TrainingError(f"{where}: unknown settings {', '.join(unknown)}; valid are {', '.join(known)}")
        if listed is not None:
            if not isinstance(listed, list) or not all(isinstance(name, str) and name in known for name in listed):
                raise TrainingError(f"{where}: `given` must be a list of names of settings; found {listed!r}")
            listed = frozenset(listed).union(flags)
        converted = {name: _convert(name, annotation_of(known[name]), value, where) for name, value in values.items()}
        return cls(**converted, given=listed)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "TrainingSettings":
        """Read a YAML file of settings."""
        return cls.from_mapping(read_yaml(path), str(path))

    def to_yaml(self, path: str | Path) -> None:
        """Write all settings, including defaults, and which of them were given."""
        import yaml

        values = {item.name: getattr(self, item.name) for item in setting_fields()}
        values["given"] = [name for name in values if name in (self.given or ())]
        atomic_write(Path(path), yaml.safe_dump(values, sort_keys=False))


def annotation_of(item: Field) -> str:
    """Return a field's type as written in the source: `int`, `float | None`, ..."""
    return (
        item.type.__name__ if isinstance(item.type, type) and item.type in (int, float, str, bool) else str(item.type)
    )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Raises:
        TrainingError: the file does not exist or does not contain a mapping.
    """
    import yaml

    if not Path(path).is_file():
        raise TrainingError(f"{path}: no such settings file")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise TrainingError(f"{path}: invalid YAML ({error})") from error
    if not isinstance(values, dict):
        raise TrainingError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values


def _convert(name: str, annotation: str, value: Any, where: str) -> Any:
    """Convert a value to its field's type; YAML reads 6e-4 as a string and 6 as an integer."""
    if value is None and "None" in annotation:
        return None
    kind = annotation.split(" |")[0]
    try:
        if kind == "list[int]" and isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
            return list(value)
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "int" and type(value) is int:
            return value
        if kind == "float" and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
        if kind == "str" and isinstance(value, str):
            return value
    except (ValueError, OverflowError):
        pass
    raise TrainingError(f"{where}: `{name}` must be {annotation}; found {value!r}")


def _problem(item: Field, value: Any) -> str | None:
    """Return what is wrong with the type or the range of one setting."""
    annotation, limits = annotation_of(item), item.metadata
    kind = annotation.split(" |")[0]
    if value is None and "None" in annotation:
        return None
    if not _has_type(kind, value):
        return f"`{item.name}` must be {annotation}; found {value!r} ({type(value).__name__})"
    if "choices" in limits:
        if value in limits["choices"]:
            return None
        return f"`{item.name}` must be one of {', '.join(map(str, limits['choices']))}; found {value!r}"
    if kind not in ("int", "float"):
        return None
    tests = (("minimum", "at least", ge), ("above", "above", gt), ("maximum", "at most", le), ("below", "below", lt))
    ranges = {"maximum": _LARGEST[kind], **limits}
    bounds = [(name, words, holds(value, ranges[name])) for name, words, holds in tests if name in ranges]
    if all(holds for _, _, holds in bounds):
        return None
    needed = " and ".join(f"{words} {ranges[name]}" for name, words, holds in bounds if name in limits or not holds)
    return f"`{item.name}` must be {needed}; found {value}"


def _has_type(kind: str, value: Any) -> bool:
    if kind == "list[int]":
        return isinstance(value, (list, tuple)) and all(type(entry) is int for entry in value)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value).__name__ == kind


def _device_problems(device: str | None) -> Iterator[str]:
    """Yield what is wrong with the device: a process trains on the CPU or on the one accelerator that it is given."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    available = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    if device not in (None, *available):
        yield (
            f"`device` must be one of {', '.join(available)}, the devices of this machine; found {device!r}. Choose "
            "among several GPUs with CUDA_VISIBLE_DEVICES or `torchrun`"
        )


def _report_problems(report_to: str) -> Iterator[str]:
    """Yield what is wrong with the integration: transformers does not know it, or its package is not installed."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    if report_to in ("none", "all"):
        return
    if report_to not in INTEGRATION_TO_CALLBACK:
        known = ", ".join(["none", "all", *sorted(INTEGRATION_TO_CALLBACK)])
        yield f"`report_to` must be one of {known}; found {report_to!r}"
    # transformers lists neither flyte nor, beside mlflow, azure_ml, even if they are installed.
    elif report_to not in (*get_available_reporting_integrations(), "flyte", "azure_ml"):
        yield f"`report_to` is {report_to}, whose package is not installed: `pip install {report_to.replace('_', '-')}`"
