"""Everything that a training run can be told.

Owns: `TrainingSettings`, its checks, its YAML form. The command line has one flag for each field
(`hf_dflash_cli.train`).

Does not know: what is done with any of it.
"""

from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import TrainingError


def setting(default: Any, help: str) -> Any:
    """A field with a line of explanation."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainingSettings:
    """One training run. Every field is a flag of `hf-dflash train` and a key of its YAML file."""

    target: str | None = setting(None, "Target model: Hub name or local folder.")
    data: str | None = setting(None, "File of token ids that `hf-dflash data` wrote.")
    out: str | None = setting(None, "Folder for checkpoints, the draft, figures and the settings.")

    version: int = setting(1, "DFlash 1, or 2 with convolutions and a candidate selector.")
    layers: int = setting(5, "Layers of the draft.")
    block_size: int = setting(16, "Tokens in a block, anchor included.")
    taps: list[int] | None = setting(None, "Target layers to tap (0-based); default: num_taps of them, evenly spread.")
    num_taps: int = setting(5, "How many layers to tap where `taps` is not given.")
    mask_token_id: int | None = setting(
        None, "Token that stands for a position to be proposed; default: an unused one."
    )
    sliding_window: int | None = setting(None, "Window of the draft's attention; default: full attention.")
    sliding_causal: bool = setting(True, "Sliding layers are causal inside the block (DFlash 2: never).")
    intermediate_size: int | None = setting(None, "Width of the draft's MLP; default: the target's.")
    num_attention_heads: int | None = setting(None, "Default: the target's.")
    num_key_value_heads: int | None = setting(None, "Default: the target's.")
    head_dim: int | None = setting(None, "Default: the target's.")
    rope_theta: float | None = setting(None, "Default: the target's.")
    conv_kernel_size: int = setting(2, "DFlash 2: tokens under the convolutions.")
    conv_group_size: int = setting(16, "DFlash 2: channels that share a dynamic kernel.")
    selector_rank: int = setting(64, "DFlash 2: width of the selector's codebooks.")
    selector_top_k: int = setting(16, "DFlash 2: candidates per position.")
    initial_weights: str = setting("target", "target: copied from the target's last layers; random.")
    warm_start: str | None = setting(None, "A draft to go on with: Hub name or local folder, any layout.")

    anchors: int = setting(512, "Blocks per sequence and step, at random places of the response.")
    max_length: int = setting(3072, "Longest sequence in tokens; responses are cut to it.")
    gamma: float | None = setting(None, "Decay of the position weights; default: 7 for block 16, 5 for 10, 4 for 8.")
    weighting: str = setting("decay", "decay: exp(-(k-1)/gamma); d-pace: by what limits acceptance now.")
    d_pace_alpha: float = setting(0.5, "Smoothing of D-PACE, above 0 and up to 1.")
    distillation: float = setting(0.0, "Share of the loss that follows the target's own distribution, 0 to 1.")
    selector_weight: float = setting(1.0, "DFlash 2: weight of the selector's loss.")
    loss_vocabulary: int | None = setting(
        None, "Look only at this many frequent tokens (and the step's labels); default: all."
    )
    loss_chunk: int = setting(1024, "Block positions whose logits are held at a time.")
    states: str = setting("online", "Target states: online (a forward each step) or cached (on disk).")
    states_dir: str | None = setting(None, "Where cached states go; default: OUT/states.")

    epochs: float = setting(6.0, "Passes over the data.")
    max_steps: int = setting(-1, "Steps, instead of epochs.")
    batch_size: int = setting(1, "Sequences per step and device.")
    accumulate: int = setting(1, "Steps whose gradients are added up.")
    learning_rate: float = setting(6e-4, "Peak learning rate of AdamW.")
    warmup: float = setting(0.04, "Share of the steps for warm-up; then a cosine.")
    weight_decay: float = setting(0.01, "Weight decay of AdamW.")
    clip: float = setting(1.0, "Largest gradient norm.")
    precision: str = setting(
        "auto", "fp32, bf16 (autocast over fp32 weights), or auto: bf16 where the device has it fast."
    )
    attention: str = setting("sdpa", "Attention of the draft in training: sdpa or flex_attention.")
    seed: int = setting(0, "Seed of everything random.")
    device: str | None = setting(None, "cpu, or leave it to accelerate.")
    target_dtype: str = setting("auto", "Target's dtype: auto, bfloat16, float32, float16.")

    held_out: int = setting(32, "Records kept out of training to measure acceptance.")
    evaluate_every: int = setting(500, "Steps between measurements of acceptance.")
    save_every: int = setting(500, "Steps between checkpoints.")
    keep: int = setting(2, "Checkpoints that are kept.")
    log_every: int = setting(20, "Steps between log lines.")
    report_to: str = setting("none", "Where transformers' Trainer reports: none, tensorboard, wandb, ...")
    final_prompts: int = setting(8, "Held-out prompts for the real tau at the end, by generate; 0: none.")
    final_tokens: int = setting(256, "New tokens of each.")
    layout: str = setting("canonical", "Layout of the finished draft: canonical, zlab, speculators.")
    trust_remote_code: bool = setting(False, "Run model code that the target's repo carries.")

    @property
    def named(self) -> set[str]:
        """The fields that differ from their default: what the user asked for."""
        return {item.name for item in fields(self) if getattr(self, item.name) != item.default}

    def check(self) -> "TrainingSettings":
        """Return the settings, or raise with every mistake in them.

        Raises:
            TrainingError
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
        least = {
            "block_size": 2,
            "layers": 1,
            "num_taps": 1,
            "anchors": 1,
            "batch_size": 1,
            "accumulate": 1,
            "loss_chunk": 1,
        }
        least |= {"max_length": 4, "save_every": 1, "evaluate_every": 1, "log_every": 1, "keep": 1, "held_out": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                problems.append(f"`{name}` must be at least {minimum}; found {getattr(self, name)}")
        if not 0 <= self.distillation <= 1:
            problems.append(f"`distillation` must be from 0 to 1; found {self.distillation}")
        if not 0 < self.d_pace_alpha <= 1:
            problems.append(f"`d_pace_alpha` must be above 0 and at most 1; found {self.d_pace_alpha}")
        if self.gamma is not None and not self.gamma > 0:
            problems.append(f"`gamma` must be above 0; found {self.gamma}")
        if self.loss_vocabulary is not None and self.loss_vocabulary < max(2, self.selector_top_k):
            problems.append(
                f"`loss_vocabulary` must be at least {max(2, self.selector_top_k)}; found {self.loss_vocabulary}"
            )
        if problems:
            raise TrainingError("the training settings cannot be used: " + "; ".join(problems))
        return self

    @classmethod
    def from_mapping(cls, values: dict[str, Any], where: str) -> "TrainingSettings":
        """Settings from a mapping, with values checked against each field's type.

        Raises:
            TrainingError: unknown keys or values of another type.
        """
        known = {item.name: item for item in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise TrainingError(f"{where}: unknown settings {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**{name: _typed(name, annotation_of(known[name]), value, where) for name, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | Path) -> "TrainingSettings":
        """Read a YAML file of settings."""
        return cls.from_mapping(read_yaml(path), str(path))

    def to_yaml(self, path: str | Path) -> None:
        """Write all settings, defaults too."""
        import yaml

        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False), encoding="utf-8")


def annotation_of(item: Field) -> str:
    """A field's type as it is written: `int`, `float | None`, ..."""
    return (
        item.type.__name__ if isinstance(item.type, type) and item.type in (int, float, str, bool) else str(item.type)
    )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        TrainingError: the file is not there or holds no mapping.
    """
    import yaml

    if not Path(path).is_file():
        raise TrainingError(f"{path}: no such settings file")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TrainingError(f"{path}: not YAML ({error})") from error
    if not isinstance(values, dict):
        raise TrainingError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values


def _typed(name: str, annotation: str, value: Any, where: str) -> Any:
    """The value as its field's type; YAML reads 6e-4 as text and 6 as an integer."""
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
