"""A training run from settings to a finished draft: checks, draft, target states, training, evaluation, saving."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_dflash.draft.errors import MissingPackageError, TrainingError
from hf_dflash.draft.loading import load_draft
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.evaluation import Acceptance, measure_acceptance
from hf_dflash.training.objective import Objective
from hf_dflash.training.plot import plot_run
from hf_dflash.training.published import save_draft
from hf_dflash.training.records import (
    Record,
    RecordDataset,
    Records,
    read_records,
    response_token_counts,
    save_split,
    split,
)
from hf_dflash.training.settings import TrainingSettings
from hf_dflash.training.setup_draft import check_warm_start, choose_mask_token, copy_from_target, make_config
from hf_dflash.training.state_cache import CachedStates, build_state_cache, cache_bytes
from hf_dflash.training.states import StateCapture

SETTINGS_FILE, DRAFT_FOLDER, PLOT_FILE, REPORT_FILE = "training.yaml", "draft", "training.png", "report.json"


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run.

    Attributes:
        draft_folder: the finished draft in the requested layout; None if training was interrupted.
        steps: optimizer steps done.
        held_out: acceptance on the held-out records, None if none were held out.
        real_tau: acceptance length of `generate` on held-out prompts, None if it was not measured.
        interrupted: whether training was stopped by Ctrl-C; a complete checkpoint to resume from was saved.
    """

    draft_folder: Path | None
    steps: int
    held_out: Acceptance | None
    real_tau: float | None
    interrupted: bool


def train(
    settings: TrainingSettings,
    *,
    resume: bool = False,
    target_model: Any = None,
    tokenizer: Any = None,
    log: Callable[[str], None] = print,
) -> TrainingResult:
    """Train a draft.

    Args:
        resume: continue from the latest complete checkpoint in `settings.out`, with the same data order.
        target_model, tokenizer: already loaded; by default, `settings.target` is loaded.
        log: called with each line of progress.

    Raises:
        TrainingError: data, settings or folder cannot be used; nothing has been written in this case.
        UnsupportedTargetError: the target cannot be tapped.
        MissingPackageError: accelerate is not installed.
    """
    settings = settings.check()
    arguments = _arguments(settings)
    if not is_main_process():
        log = _no_log
    out = Path(settings.out)
    checkpoint = _checkpoint(out, settings, resume)
    torch.manual_seed(settings.seed)
    target, tokenizer = _load_target(settings, target_model, tokenizer)
    warm_start = load_draft(settings.warm_start, dtype=torch.float32) if settings.warm_start else None
    block_size = warm_start.config.block_size if warm_start is not None else settings.block_size
    records = read_records(
        settings.data, block_size=block_size, max_length=settings.max_length, vocab_size=target.num_embeddings
    )
    training, held_out = split(records.kept, settings.held_out, settings.seed)
    draft = _make_draft(settings, target, tokenizer, training, warm_start, log)
    _log_plan(log, settings, target, draft, records, training, held_out)

    if is_main_process():
        out.mkdir(parents=True, exist_ok=True)
        settings.to_yaml(out / SETTINGS_FILE)
        save_split(out / "held_out.json", held_out)
    states = _states(settings, target, draft, training, log)
    trainer, interrupt = _make_trainer(settings, arguments, target, draft, training, held_out, states)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except OSError as error:
        raise TrainingError(
            f"training stopped at step {trainer.state.global_step}: {error}. Continue from the latest complete "
            "checkpoint with --resume"
        ) from error
    if is_main_process():
        plot_run(trainer.state.log_history, out / PLOT_FILE)
    if interrupt.interrupted:
        log(f"Interrupted at step {trainer.state.global_step}; a checkpoint was saved. Continue with --resume.")
        return TrainingResult(None, trainer.state.global_step, None, None, True)
    return _finish(settings, target, draft, held_out, trainer.state.global_step, log)


def is_main_process() -> bool:
    """Whether this is the process that writes and logs."""
    from accelerate import PartialState

    return PartialState().is_main_process


def _no_log(line: str) -> None:
    """The `log` of all processes but the main one."""


def _arguments(settings: TrainingSettings) -> Any:
    """Make transformers' arguments first: this also initializes the process group."""
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("training needs accelerate: `pip install accelerate`") from error
    from hf_dflash.training.trainer import make_arguments

    return make_arguments(settings)


def _checkpoint(out: Path, settings: TrainingSettings, resume: bool) -> Path | None:
    from hf_dflash.training.trainer import check_resume, last_complete_checkpoint

    if resume:
        return check_resume(out, out / SETTINGS_FILE, settings)
    if last_complete_checkpoint(out) is not None:
        raise TrainingError(f"{out} already holds checkpoints: continue with --resume, or choose another folder")
    return None


def _load_target(settings: TrainingSettings, model: Any, tokenizer: Any) -> tuple[Target, Any]:
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": settings.trust_remote_code}
    if model is None:
        dtype = settings.target_dtype if settings.target_dtype == "auto" else getattr(torch, settings.target_dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=dtype, **options)
        if settings.device != "cpu":
            model = model.to(PartialState().device)
        try:
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(settings.target, **options)
        except (OSError, ValueError):
            # Training runs on token ids. The tokenizer only helps to choose the mask token.
            tokenizer = None
    return Target(model.eval().requires_grad_(False)), tokenizer


def _make_draft(
    settings: TrainingSettings,
    target: Target,
    tokenizer: Any,
    training: list[Record],
    warm_start: DFlashDraftModel | None,
    log: Callable[[str], None],
) -> DFlashDraftModel:
    """Return a new draft, or the warm start."""
    counts = response_token_counts(training, target.num_embeddings)
    for record in training:
        counts += torch.bincount(torch.tensor(record.prompt_ids), minlength=target.num_embeddings)
    if warm_start is not None:
        check_warm_start(warm_start, target, settings)
        choose_mask_token(target, tokenizer, counts, warm_start.config.mask_token_id)
        draft = warm_start
        log(f"Starting from {settings.warm_start}: {draft.num_parameters() / 1e6:.1f} million parameters.")
    else:
        config = make_config(target, settings, choose_mask_token(target, tokenizer, counts, settings.mask_token_id))
        draft = DFlashDraftModel(config)
        if settings.initial_weights == "target":
            copied = copy_from_target(draft, target)
            log(f"Copied {len(copied)} of {len(list(draft.parameters()))} parameters from the target.")
    draft.set_attn_implementation(settings.attention)
    return draft.float().to(target.model.device).train()


def _log_plan(
    log: Callable[[str], None],
    settings: TrainingSettings,
    target: Target,
    draft: DFlashDraftModel,
    records: Records,
    training: list[Record],
    held_out: list[Record],
) -> None:
    config = draft.config
    log(
        f"Data: {len(training)} training records, {len(held_out)} held out, {records.num_tokens:,} tokens; "
        f"{records.too_short} dropped (shorter than a block), {records.truncated} truncated to {settings.max_length} "
        "tokens."
    )
    log(
        f"Draft: DFlash {config.dflash_version}, {config.num_hidden_layers} layers, block {config.block_size}, "
        f"taps {config.target_layer_ids} of {target.name} ({target.text_config.num_hidden_layers} layers), "
        f"mask token {config.mask_token_id}, "
        f"{draft.num_parameters() / 1e6:.1f} million parameters."
    )


def _states(
    settings: TrainingSettings,
    target: Target,
    draft: DFlashDraftModel,
    training: list[Record],
    log: Callable[[str], None],
) -> CachedStates | None:
    """Return the cached target states, building them if needed; None for online states."""
    if settings.states == "online":
        return None
    from accelerate import PartialState
    from tqdm.auto import tqdm

    final = settings.distillation > 0
    description = {
        "target": target.name,
        "taps": draft.config.target_layer_ids,
        "taps_width": draft.config.context_size,
        "final_width": target.text_config.hidden_size if final else 0,
        "max_length": settings.max_length,
        "data": str(settings.data),
    }
    folder = Path(settings.states_dir or Path(settings.out) / "states")
    tokens = sum(map(len, training))
    size = cache_bytes(tokens, description["taps_width"], description["final_width"])
    log(f"Target states: {tokens:,} tokens, {size / 1e9:.2f} GB in {folder}.")
    capture = StateCapture(target, draft.config.target_layer_ids, with_final=final)
    bar = tqdm(total=len(training), desc="target states", unit="record", disable=not is_main_process())
    # The main process builds the cache, the others wait and then read it.
    with bar, PartialState().main_process_first():
        build_state_cache(folder, training, capture, description, on_batch=lambda done: bar.update(done - bar.n))
    return CachedStates(folder)


def _make_trainer(
    settings: TrainingSettings,
    arguments: Any,
    target: Target,
    draft: DFlashDraftModel,
    training: list[Record],
    held_out: list[Record],
    states: CachedStates | None,
) -> tuple[Any, Any]:
    from hf_dflash.training.trainer import CompleteCheckpoints, DraftTrainer, StopOnInterrupt

    frequent = None
    if settings.loss_vocabulary is not None and settings.loss_vocabulary < target.num_embeddings:
        frequent = response_token_counts(training, target.num_embeddings).topk(settings.loss_vocabulary).indices
    if arguments.world_size > 1 and (draft.config.dflash_version == 2 or draft.embed_tokens is not None):
        raise TrainingError(
            "DFlash 2 drafts and drafts with their own embeddings can only be trained in a single process: they use "
            "parameters outside the draft's forward, whose gradients would not be synchronized"
        )
    interrupt = StopOnInterrupt()
    trainer = DraftTrainer(
        draft=draft,
        target=target,
        objective=Objective(draft, target, settings, frequent),
        arguments=arguments,
        train_records=RecordDataset(training, states),
        held_out=held_out,
        callbacks=[interrupt, CompleteCheckpoints()],
    )
    return trainer, interrupt


def _finish(
    settings: TrainingSettings,
    target: Target,
    draft: DFlashDraftModel,
    held_out: list[Record],
    steps: int,
    log: Callable[[str], None],
) -> TrainingResult:
    """Evaluate the trained draft and save it in bfloat16, the dtype that drafts run in."""
    out = Path(settings.out)
    draft = draft.eval().to(torch.bfloat16)
    measured = None
    if held_out:
        measured = measure_acceptance(draft, target, [(list(r.prompt_ids), list(r.response_ids)) for r in held_out])
        shares = " ".join(f"{share:.2f}" for share in measured.by_position)
        log(f"Held-out records: tau {measured.tau:.2f}; acceptance by position {shares}.")
    real = _real_tau(settings, target, draft, held_out)
    if real is not None:
        log(f"generate() on {min(settings.final_prompts, len(held_out))} held-out prompts: tau {real:.2f}.")
    report = {
        "steps": steps,
        "held_out_tau": measured and round(measured.tau, 4),
        "held_out_accepted": measured and [round(share, 4) for share in measured.by_position],
        "real_tau": real and round(real, 4),
    }
    folder = out / DRAFT_FOLDER
    if is_main_process():
        (out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        save_draft(draft, folder, settings.layout)
    log(f"The draft is in {folder} ({settings.layout} layout).")
    return TrainingResult(folder, steps, measured, real, False)


@torch.no_grad()
def _real_tau(
    settings: TrainingSettings, target: Target, draft: DFlashDraftModel, held_out: list[Record]
) -> float | None:
    """Measure tokens per round of greedy `generate` with the draft, over the first held-out prompts."""
    from hf_dflash.decoding.generate import DFlashGenerate
    from hf_dflash.decoding.statistics import DFlashStatistics

    stats: list[DFlashStatistics] = []
    generate = DFlashGenerate(draft, stats=stats.append)
    for record in held_out[: settings.final_prompts]:
        ids = torch.tensor([record.prompt_ids], device=target.model.device)
        options = {"max_new_tokens": settings.final_tokens, "do_sample": False, "custom_generate": generate}
        target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    rounds = sum(call.rounds for call in stats)
    return sum(sum(call.committed) for call in stats) / rounds if rounds else None
