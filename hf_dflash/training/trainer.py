"""transformers' Trainer with a draft's loss and evaluation, and its callbacks (Ctrl-C, complete checkpoints).

Logging, mixed precision, multi-device training, resuming and `report_to` are left to transformers.
"""

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.files import atomic_write
from hf_dflash.target.target import Target
from hf_dflash.training.evaluation import Acceptance, measure_acceptance
from hf_dflash.training.objective import Objective
from hf_dflash.training.records import Record, RecordDataset, collate
from hf_dflash.training.settings import TrainingSettings

logger = logging.get_logger(__name__)

COMPLETE = "complete"
"""Marker file, written last: a checkpoint without it is incomplete and not resumed from."""


class DraftTrainer(Trainer):
    """Trains a draft. Every checkpoint can be loaded with `load_draft`."""

    def __init__(
        self,
        *,
        draft: DFlashDraftModel,
        target: Target,
        objective: Objective,
        arguments: TrainingArguments,
        train_records: RecordDataset,
        held_out: Sequence[Record],
        callbacks: list[TrainerCallback],
    ):
        super().__init__(
            model=draft,
            args=arguments,
            train_dataset=train_records,
            eval_dataset=RecordDataset(held_out),
            data_collator=collate,
            callbacks=callbacks,
        )
        self.model_accepts_loss_kwargs = False
        self._target, self._objective, self._held_out = target, objective, held_out
        self._metrics: dict[str, list[float]] = {}

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Return the objective's loss, and collect its metrics for the next log line."""
        with self.compute_loss_context_manager():
            step = self._objective(model, inputs, self.state.global_step)
        for name, value in step.metrics.items():
            self._metrics.setdefault(name, []).append(value)
        return step.loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, adding the mean of each metric since the last log line."""
        if "loss" in logs:
            logs |= {name: round(sum(values) / len(values), 4) for name, values in self._metrics.items()}
            self._metrics.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure acceptance on the held-out records, logged as `eval_tau`, `eval_accepted_1`, ..."""
        sequences = [(list(record.prompt_ids), list(record.response_ids)) for record in self._held_out]
        draft = self.accelerator.unwrap_model(self.model)
        acceptance: Acceptance = measure_acceptance(draft, self._target, sequences)
        metrics = {"eval_tau": round(acceptance.tau, 4)}
        metrics |= {f"eval_accepted_{k}": round(share, 4) for k, share in enumerate(acceptance.by_position, start=1)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class CompleteCheckpoints(TrainerCallback):
    """Marks a checkpoint as complete once all its files are on disk."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            atomic_write(folder / COMPLETE, json.dumps({"step": state.global_step}))


class StopOnInterrupt(TrainerCallback):
    """Stops after the current step and saves a checkpoint on the first Ctrl-C; stops immediately on the second."""

    def __init__(self) -> None:
        self.interrupted = False
        self._previous_handler: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._previous_handler = signal.signal(signal.SIGINT, self._interrupt)
        except ValueError:  # not the main thread, where no handler can be set; Ctrl-C reaches the main thread anyway
            self._previous_handler = None

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.interrupted:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)


def last_complete_checkpoint(out: str | Path) -> Path | None:
    """Return the latest complete checkpoint under `out`, removing newer incomplete ones."""
    while Path(out).is_dir() and (latest := get_last_checkpoint(str(out))) is not None:
        if (Path(latest) / COMPLETE).exists():
            return Path(latest)
        shutil.rmtree(latest)
    return None


def make_arguments(settings: TrainingSettings) -> TrainingArguments:
    """Convert the settings to transformers' arguments, on the device that accelerate assigns to this process."""
    bf16 = settings.precision == "bf16"
    if settings.precision == "auto":
        bf16 = settings.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    arguments = TrainingArguments(
        output_dir=str(settings.out),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        bf16=bf16,
        use_cpu=settings.device == "cpu",
        seed=settings.seed,
        logging_steps=settings.log_every,
        logging_first_step=True,
        eval_strategy="steps" if settings.held_out else "no",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        save_total_limit=settings.keep,
        report_to=settings.report_to,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=None,
    )
    logger.info(f"training on {arguments.device}")  # `device` initializes the process group
    return arguments


def check_resume(out: Path, settings_file: Path, settings: TrainingSettings) -> Path:
    """Return the checkpoint to resume from.

    Raises:
        TrainingError: there is none, or it was trained with different settings.
    """
    checkpoint = last_complete_checkpoint(out)
    if checkpoint is None:
        raise TrainingError(
            f"--resume: {out} has no complete checkpoint; start without --resume, or set --out to the folder of the run"
        )
    stored = TrainingSettings.from_yaml(settings_file)
    may_differ = {
        "out",
        "log_every",
        "evaluate_every",
        "save_every",
        "keep",
        "report_to",
        "final_prompts",
        "final_tokens",
        "layout",
    }
    mismatches = [
        f"{name} {getattr(stored, name)!r} (now {getattr(settings, name)!r})"
        for name in sorted(vars(stored))
        if name not in may_differ and getattr(stored, name) != getattr(settings, name)
    ]
    if mismatches:
        raise TrainingError(f"--resume: {out} was trained with different settings: {'; '.join(mismatches)}")
    return checkpoint
