"""transformers' Trainer, with a draft's loss and measurements.

Owns: `DraftTrainer` and its callbacks: stopping on Ctrl-C, marking a checkpoint as complete, collecting figures.

Does not know: files of data, the command line, layouts. Logging, mixed precision, several devices, resuming and
`report_to` are transformers' own.
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
"""The file that is written into a checkpoint last; a folder without it was interrupted and is not resumed from."""


class DraftTrainer(Trainer):
    """Trains a draft; every checkpoint is a draft that `load_draft` reads."""

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
        self._figures: dict[str, list[float]] = {}

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """The objective's loss; its figures go into the next log line."""
        with self.compute_loss_context_manager():
            step = self._objective(model, inputs, self.state.global_step)
        for name, value in step.figures.items():
            self._figures.setdefault(name, []).append(value)
        return step.loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the mean of each figure since the last log line."""
        if "loss" in logs:
            logs |= {name: round(sum(values) / len(values), 4) for name, values in self._figures.items()}
            self._figures.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Acceptance on the held-out records, logged as `eval_tau`, `eval_accepted_1`, ..."""
        sequences = [(list(record.prompt_ids), list(record.response_ids)) for record in self._held_out]
        draft = self.accelerator.unwrap_model(self.model)
        found: Acceptance = measure_acceptance(draft, self._target, sequences)
        figures = {"eval_tau": round(found.tau, 4)}
        figures |= {f"eval_accepted_{k}": round(share, 4) for k, share in enumerate(found.by_position, start=1)}
        self.log(figures)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures


class CompleteCheckpoints(TrainerCallback):
    """Marks each checkpoint when all of its files are on disk."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            atomic_write(folder / COMPLETE, json.dumps({"step": state.global_step}))


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C ends training after the running step, with a checkpoint; the second one ends it at once."""

    def __init__(self) -> None:
        self.interrupted = False
        self._before: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        except (
            ValueError
        ):  # not the main thread: Python allows no handler here, and Ctrl-C reaches the main thread anyway
            self._before = None

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
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def last_complete_checkpoint(out: str | Path) -> Path | None:
    """The newest complete checkpoint under `out`; interrupted ones found on the way are removed."""
    while Path(out).is_dir() and (found := get_last_checkpoint(str(out))) is not None:
        if (Path(found) / COMPLETE).exists():
            return Path(found)
        shutil.rmtree(found)
    return None


def make_arguments(settings: TrainingSettings) -> TrainingArguments:
    """The settings in transformers' words, on the device that accelerate gives to this process."""
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
    logger.info(f"training on {arguments.device}")  # asking for the device joins the processes
    return arguments


def check_resume(out: Path, settings_file: Path, settings: TrainingSettings) -> Path:
    """The checkpoint to resume from.

    Raises:
        TrainingError: there is none, or it belongs to a run with other settings.
    """
    checkpoint = last_complete_checkpoint(out)
    if checkpoint is None:
        raise TrainingError(
            f"--resume: {out} holds no complete checkpoint; start without --resume, or name the folder of the run"
        )
    earlier = TrainingSettings.from_yaml(settings_file)
    free = {
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
    differing = [
        f"{name} {getattr(earlier, name)!r} (now {getattr(settings, name)!r})"
        for name in sorted(vars(earlier))
        if name not in free and getattr(earlier, name) != getattr(settings, name)
    ]
    if differing:
        raise TrainingError(f"--resume: {out} was trained with other settings: {'; '.join(differing)}")
    return checkpoint
