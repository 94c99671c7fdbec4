"""transformers' Trainer with a draft's loss and evaluation, and its callbacks (Ctrl-C, complete checkpoints).

Logging, mixed precision, multi-device training, resuming and `report_to` are left to transformers, what is in the
folder of a run to `folder`.
"""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.logs import get_logger
from hf_dflash.target.target import Target
from hf_dflash.training.evaluation import Acceptance, measure_acceptance
from hf_dflash.training.folder import claim_checkpoint, complete_checkpoint
from hf_dflash.training.objective import Objective
from hf_dflash.training.records import Record, RecordDataset, collate
from hf_dflash.training.settings import TrainingSettings

logger = get_logger(__name__)

LATE_SIGNAL = 2.0
"""Seconds that a process waits for its own Ctrl-C after the others have stopped because of theirs."""


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

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint into a folder of its own, and return when all processes have written their part."""
        if self.args.should_save:
            claim_checkpoint(checkpoint_folder(self.args, self.state))
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint at the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class CompleteCheckpoints(TrainerCallback):
    """Marks a checkpoint as complete once all its files are on disk, and deletes the oldest of this run.

    Args:
        keep: how many complete checkpoints to keep.
    """

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = checkpoint_folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            complete_checkpoint(folder, self._keep)


class StopOnInterrupt(TrainerCallback):
    """Stops after the current step and saves a checkpoint on the first Ctrl-C; stops immediately on the second.

    The signals of several processes arrive at different moments. So that all stop after the same step, they agree at
    the end of each: a sum over one integer, next to that over the gradients.

    Attributes:
        interrupted: whether training was stopped by Ctrl-C; the same in every process.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._signaled = False
        self._installed = False
        self._previous_handler: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._previous_handler = signal.signal(signal.SIGINT, self._interrupt)
            self._installed = True
        except ValueError:  # not the main thread, where no handler can be set; Ctrl-C reaches the main thread anyway
            pass

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._signaled:
            raise KeyboardInterrupt
        self._signaled = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._any_signaled(args):
            self.interrupted = True
            control.should_save = control.should_training_stop = True
        return control

    def _any_signaled(self, args: TrainingArguments) -> bool:
        if args.world_size == 1:
            return self._signaled
        signaled = torch.tensor(int(self._signaled), device=args.device)
        torch.distributed.all_reduce(signaled)
        return bool(signaled)

    def restore(self) -> None:
        """Give Ctrl-C back to its earlier handler; call it however training ended."""
        if not self._installed:
            return
        # The user pressed Ctrl-C once: a signal that is late here must not end what follows a clean stop.
        end = time.monotonic() + (LATE_SIGNAL if self.interrupted else 0)
        while not self._signaled and time.monotonic() < end:
            time.sleep(0.05)
        previous = signal.SIG_DFL if self._previous_handler is None else self._previous_handler
        signal.signal(signal.SIGINT, previous)
        self._installed = False


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
        report_to=settings.report_to,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=None,
    )
    device = arguments.device  # also initializes the process group
    if arguments.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
        # transformers would replicate the draft on every visible GPU (DataParallel). One process uses one device.
        logger.warning(f"Training on {device}, one of {arguments.n_gpu} GPUs. To use them all, start with `torchrun`.")
        arguments._n_gpu = 1
    return arguments
