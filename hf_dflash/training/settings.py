"""The settings of a training run, their checks and their YAML form.

`hf_dflash_cli.train` makes one command-line flag from each field.
"""

from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import TrainingError


def setting(default: Any, help: str) -> Any:
    """Declare a field with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run. Every field is a flag of `hf-dflash train` and a key of its YAML file."""

    target: str | None = setting(None, "Target model: Hub ID or local path.")
    data: str | None = setting(None, "Path to the JSONL file of token ids written by `hf-dflash data`.")
    out: str | None = setting(None, "Output directory for checkpoints, the draft, the report and the settings.")

    version: int = setting(1, "DFlash version: 1, or 2 with convolutions and a candidate selector.")
    layers: int = setting(5, "Number of draft layers.")
    block_size: int = setting(16, "Number of tokens per block, including the anchor.")
    taps: list[int] | None = setting(None, "Target layers to tap (0-based). Default: num_taps evenly spaced layers.")
    num_taps: int = setting(5, "Number of target layers to tap if `taps` is not set.")
    mask_token_id: int | None = setting(None, "Mask token for the positions to predict. Default: an unused token.")
    sliding_window: int | None = setting(None, "Sliding window size of the draft's attention. Default: full attention.")
    sliding_causal: bool = setting(True, "Whether sliding layers are causal within the block (DFlash 2: never).")
    intermediate_size: int | None = setting(None, "Intermediate size of the draft's MLP. Default: the target's.")
    num_attention_heads: int | None = setting(None, "Number of attention heads. Default: the target's.")
    num_key_value_heads: int | None = setting(None, "Number of key/value heads. Default: the target's.")
    head_dim: int | None = setting(None, "Dimension of the attention heads. Default: the target's.")
    rope_theta: float | None = setting(None, "Base of the rotary embeddings. Default: the target's.")
    conv_kernel_size: int = setting(2, "DFlash 2: kernel size of the convolutions, in tokens.")
    conv_group_size: int = setting(16, "DFlash 2: number of channels that share a dynamic kernel.")
    selector_rank: int = setting(64, "DFlash 2: rank of the selector's codebooks.")
    selector_top_k: int = setting(16, "DFlash 2: number of candidates per position.")
    initial_weights: str = setting("target", "Initialization: target (copied from the target's last layers) or random.")
    warm_start: str | None = setting(None, "Draft to start from, in any layout: Hub ID or local path.")

    anchors: int = setting(512, "Maximum number of blocks per sequence and step, at random response positions.")
    max_length: int = setting(3072, "Maximum sequence length in tokens; responses are truncated to it.")
    gamma: float | None = setting(None, "Decay of the position weights. Default: 7 for block 16, 5 for 10, 4 for 8.")
    weighting: str = setting("decay", "Position weights: decay (exp(-(k-1)/gamma)) or d-pace.")
    d_pace_alpha: float = setting(0.5, "Smoothing factor of D-PACE, in (0, 1].")
    distillation: float = setting(0.0, "Weight of the KL divergence to the target's distribution, in [0, 1].")
    selector_weight: float = setting(1.0, "DFlash 2: weight of the selector loss.")
    loss_vocabulary: int | None = setting(
        None, "Compute the loss over this many frequent tokens (and the step's labels). Default: all."
    )
    loss_chunk: int = setting(1024, "Number of block positions whose logits are computed at a time.")
    states: str = setting("online", "Target hidden states: online (a target forward each step) or cached (on disk).")
    states_dir: str | None = setting(None, "Directory of the cached states. Default: OUT/states.")

    epochs: float = setting(6.0, "Number of training epochs.")
    max_steps: int = setting(-1, "Number of training steps; overrides epochs if positive.")
    batch_size: int = setting(1, "Batch size per device, in sequences.")
    accumulate: int = setting(1, "Number of gradient accumulation steps.")
    learning_rate: float = setting(6e-4, "Peak learning rate of AdamW.")
    warmup: float = setting(0.04, "Fraction of the steps for warmup, followed by cosine decay.")
    weight_decay: float = setting(0.01, "Weight decay of AdamW.")
    clip: float = setting(1.0, "Maximum gradient norm.")
    precision: str = setting("auto", "fp32, bf16 (autocast over fp32 weights), or auto (bf16 on GPUs that support it).")
    attention: str = setting("sdpa", "Attention implementation of the draft: sdpa, flex_attention or eager.")
    seed: int = setting(0, "Random seed.")
    device: str | None = setting(None, "cpu to train on the CPU. Default: chosen by accelerate.")
    target_dtype: str = setting("auto", "dtype of the target: auto, bfloat16, float32 or float16.")

    held_out: int = setting(32, "Number of records held out to measure acceptance.")
    evaluate_every: int = setting(500, "Number of steps between evaluations of acceptance.")
    save_every: int = setting(500, "Number of steps between checkpoints.")
    keep: int = setting(2, "Maximum number of checkpoints to keep.")
    log_every: int = setting(20, "Number of steps between log lines.")
    report_to: str = setting("none", "Integration to report metrics to: none, tensorboard, wandb, ...")
    final_prompts: int = setting(8, "Number of held-out prompts to measure tau with `generate` at the end; 0 to skip.")
    final_tokens: int = setting(256, "Number of new tokens per prompt for this measurement.")
    layout: str = setting("canonical", "Layout of the finished draft: canonical, zlab or speculators.")
    trust_remote_code: bool = setting(False, "Allow custom code from the target's Hub repository.")

    @property
    def named(self) -> set[str]:
        """The fields that differ from their default, i.e. what the user set."""
        return {item.name for item in fields(self) if getattr(self, item.name) != item.default}

    def check(self) -> "TrainingSettings":
        """Return the settings, or raise an error that lists every problem.

        Raises:
            TrainingError: a setting is missing or out of range.
        """
        problems = [f"`{name}` is missing" for name in ("target", "data", "out") if not getattr(self, name)]
        choices = {
            "version": (1, 2),
            "initial_weights": ("target", "random"),
            "weighting": ("decay", "d-pace"),
            "states": ("online", "cached"),
            "precision": ("auto", "fp32", "bf16"),
            "attention": ("sdpa", "flex_attention", "eager"),
            "layout": ("canonical", "zlab", "speculators"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append(
                    f"`{name}` must be one of {', '.join(map(str, allowed))}; found {getattr(self, name)!r}"
                )
        minimums = {
            "block_size": 2,
            "layers": 1,
            "num_taps": 1,
            "anchors": 1,
            "batch_size": 1,
            "accumulate": 1,
            "loss_chunk": 1,
        }
        minimums |= {"max_length": 4, "save_every": 1, "evaluate_every": 1, "log_every": 1, "keep": 1, "held_out": 0}
        for name, minimum in minimums.items():
            if getattr(self, name) < minimum:
                problems.append(f"`{name}` must be at least {minimum}; found {getattr(self, name)}")
        if not 0 <= self.distillation <= 1:
            problems.append(f"`distillation` must be between 0 and 1; found {self.distillation}")
        if not 0 < self.d_pace_alpha <= 1:
            problems.append(f"`d_pace_alpha` must be above 0 and at most 1; found {self.d_pace_alpha}")
        if self.gamma is not None and not self.gamma > 0:
            problems.append(f"`gamma` must be above 0; found {self.gamma}")
        if self.loss_vocabulary is not None and self.loss_vocabulary < max(2, self.selector_top_k):
            problems.append(
                f"`loss_vocabulary` must be at least {max(2, self.selector_top_k)}; found {self.loss_vocabulary}"
            )
        if problems:
            raise TrainingError("invalid training settings: " + "; ".join(problems))
        return self

    @classmethod
    def from_mapping(cls, values: dict[str, Any], where: str) -> "TrainingSettings":
        """Create settings from a mapping, checking each value against its field's type.

        Raises:
            TrainingError: unknown keys or values of the wrong type.
        """
        known = {item.name: item for item in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise TrainingError(f"{where}: unknown settings {', '.join(unknown)}; valid are {', '.join(known)}")
        return cls(**{name: _convert(name, annotation_of(known[name]), value, where) for name, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | Path) -> "TrainingSettings":
        """Read a YAML file of settings."""
        return cls.from_mapping(read_yaml(path), str(path))

    def to_yaml(self, path: str | Path) -> None:
        """Write all settings, including defaults."""
        import yaml

        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False), encoding="utf-8")


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
    except yaml.YAMLError as error:
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
    except ValueError:
        pass
    raise TrainingError(f"{where}: `{name}` must be {annotation}; found {value!r}")
