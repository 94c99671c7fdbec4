"""A training run from settings to a finished draft: checks, draft, target states, training, saving, evaluation."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_dflash.draft.errors import DFlashError, MissingPackageError, TrainingError
from hf_dflash.draft.loading import load_draft, read_checkpoint
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.files import atomic_write
from hf_dflash.ownership import record_made
from hf_dflash.target.target import Target
from hf_dflash.training.evaluation import Acceptance, measure_acceptance
from hf_dflash.training.folder import DRAFT_FOLDER, PLOT_FILE, REPORT_FILE, SPLIT_FILE, check_folder, start_run
from hf_dflash.training.objective import Objective
from hf_dflash.training.plot import plot_run
from hf_dflash.training.published import layout_config, save_draft
from hf_dflash.training.records import (
    Record,
    RecordDataset,
    Records,
    read_records,
    records_of_run,
    response_token_counts,
    save_split,
    split,
)
from hf_dflash.training.settings import TrainingSettings
from hf_dflash.training.setup_draft import (
    check_target,
    check_warm_start,
    check_warm_start_settings,
    choose_mask_token,
    copy_from_target,
    make_config,
)
from hf_dflash.training.state_cache import CachedStates, build_state_cache, cache_bytes, describe_states
from hf_dflash.training.states import StateCapture


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
        resume: continue from the latest complete checkpoint in `settings.out`, with the same records in the same order.
        target_model, tokenizer: already loaded; by default, `settings.target` is loaded.
        log: called with each line of progress.

    Raises:
        TrainingError: data, settings or folder cannot be used; nothing has been written in this case.
        UnsupportedTargetError: the target cannot be tapped.
        MissingPackageError: accelerate is not installed.
    """
    settings = settings.check()
    out = Path(settings.out)
    checkpoint = _check_before_loading(settings, out, resume)
    arguments = _arguments(settings)
    if not is_main_process():
        log = _no_log
    torch.manual_seed(settings.seed)
    target, tokenizer = _load_target(settings, target_model, tokenizer)
    warm_start = load_draft(settings.warm_start, dtype=torch.float32) if settings.warm_start else None
    block_size = warm_start.config.block_size if warm_start is not None else settings.block_size
    records = _read_data(settings, block_size, target, checkpoint is not None, log)
    training, held_out = split(records.kept, settings.held_out, settings.seed)
    draft = _make_draft(settings, target, tokenizer, training, warm_start, log)
    _check_draft(settings, arguments, draft)
    objective = _objective(settings, target, draft, training)
    _log_plan(log, settings, target, draft, records, training, held_out)

    if is_main_process():
        start_run(out, settings)
        if checkpoint is None:
            save_split(out / SPLIT_FILE, records.kept, held_out)
            record_made(out, [SPLIT_FILE])
    states = _states(settings, target, draft, training, log)
    trainer, interrupt = _make_trainer(settings, arguments, target, draft, objective, training, held_out, states)
    _run(trainer, interrupt, checkpoint)
    if interrupt.interrupted:
        _plot(trainer.state.log_history, out, log)
        log(f"Interrupted at step {trainer.state.global_step}; a checkpoint was saved. Continue with --resume.")
        return TrainingResult(None, trainer.state.global_step, None, None, True)
    result = _finish(settings, target, draft, held_out, trainer.state.global_step, log)
    _plot(trainer.state.log_history, out, log)
    return result


def _check_before_loading(settings: TrainingSettings, out: Path, resume: bool) -> Path | None:
    """Check all that can be checked before the target is loaded; return the checkpoint to resume from, if any."""
    if find_spec("accelerate") is None:
        raise MissingPackageError("training needs accelerate: `pip install accelerate`")
    if not Path(settings.data).is_file():
        raise TrainingError(
            f"{settings.data} does not exist: training needs the file of token ids written by `hf-dflash data --out`"
        )
    checkpoint = check_folder(out, settings, resume)
    if settings.warm_start:
        check_warm_start_settings(read_checkpoint(settings.warm_start).config(), settings)
    return checkpoint


def _run(trainer: Any, interrupt: Any, checkpoint: Path | None) -> None:
    """Train, with Ctrl-C handled by `interrupt` only meanwhile; from a checkpoint of the last step, only load it."""
    from transformers import TrainerState

    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step >= state.max_steps:  # transformers would add a step
            trainer.state = state
            trainer.model.load_state_dict(load_draft(checkpoint, dtype=torch.float32).state_dict())
            return
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except OSError as error:
        raise TrainingError(
            f"training stopped at step {trainer.state.global_step}: {error}. Continue from the latest complete "
            "checkpoint with --resume"
        ) from error
    finally:
        interrupt.restore()


def _plot(log_history: list[dict[str, Any]], out: Path, log: Callable[[str], None]) -> None:
    """Draw the run, if that is possible: the results are on disk already, and must not be lost for a picture."""
    if not is_main_process():
        return
    try:
        plot_run(log_history, out / PLOT_FILE)
    except Exception as error:
        log(f"No {PLOT_FILE} was drawn: {error}")
    else:
        if (out / PLOT_FILE).exists():
            record_made(out, [PLOT_FILE])


def is_main_process() -> bool:
    """Whether this is the process that writes and logs."""
    from accelerate import PartialState

    return PartialState().is_main_process


def _no_log(line: str) -> None:
    """The `log` of all processes but the main one."""


def _arguments(settings: TrainingSettings) -> Any:
    """Make transformers' arguments first: this also initializes the process group."""
    from hf_dflash.training.trainer import make_arguments

    return make_arguments(settings)


def _load_target(settings: TrainingSettings, model: Any, tokenizer: Any) -> tuple[Target, Any]:
    from accelerate import PartialState
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"trust_remote_code": settings.trust_remote_code}
    config = AutoConfig.from_pretrained(settings.target, **options) if model is None else model.config
    if not settings.warm_start:
        check_target(settings, config.get_text_config(decoder=True), str(settings.target))
    if model is None:
        tokenizer = tokenizer or _load_tokenizer(str(settings.target), options)
        dtype = settings.target_dtype if settings.target_dtype == "auto" else getattr(torch, settings.target_dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=dtype, **options)
        if settings.device != "cpu":
            model = model.to(PartialState().device)
    return Target(model.eval().requires_grad_(False)), tokenizer


def _load_tokenizer(name: str, options: dict[str, Any]) -> Any:
    """Load the target's tokenizer, or return None if the target is a folder without one.

    Training runs on token ids. The tokenizer helps to choose the mask token: without it, a special token of the chat
    template could be taken.

    Raises:
        TrainingError: there is a tokenizer, but it cannot be loaded.
    """
    from transformers import AutoTokenizer

    patterns = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "*_tokens*.json")
    if Path(name).is_dir() and not any(any(Path(name).glob(pattern)) for pattern in patterns):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        raise TrainingError(
            f"the tokenizer of {name} cannot be loaded ({type(error).__name__}: {error}). It is needed to choose the "
            "mask token. Install what it needs, or repair its files"
        ) from error


def _check_draft(settings: TrainingSettings, arguments: Any, draft: DFlashDraftModel) -> None:
    """Raise now what would otherwise be raised after the target states, or after all training."""
    layout_config(draft.config, settings.layout, "bfloat16")
    if arguments.world_size > 1 and (draft.config.dflash_version == 2 or draft.embed_tokens is not None):
        raise TrainingError(
            "DFlash 2 drafts and drafts with their own embeddings can only be trained in a single process: they use "
            "parameters outside the draft's forward, whose gradients would not be synchronized"
        )


def _read_data(
    settings: TrainingSettings, block_size: int, target: Target, resumed: bool, log: Callable[[str], None]
) -> Records:
    """Read the records; for a resumed run exactly those that it was started with."""
    records = read_records(
        settings.data, block_size=block_size, max_length=settings.max_length, vocab_size=target.num_embeddings
    )
    if not resumed:
        return records
    first = records_of_run(Path(settings.out) / SPLIT_FILE, records, settings.data)
    if len(first.kept) < len(records.kept):
        log(
            f"{settings.data} has grown: this run continues with its {len(first.kept)} records, the "
            f"{len(records.kept) - len(first.kept)} new ones are not used."
        )
    return first


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

    final_width = target.text_config.hidden_size if settings.distillation > 0 else 0
    description = describe_states(target, draft.config.target_layer_ids, draft.config.context_size, final_width)
    folder = Path(settings.states_dir or Path(settings.out) / "states")
    tokens = sum(map(len, training))
    size = cache_bytes(tokens, description["taps_width"], description["final_width"])
    log(f"Target states: {tokens:,} tokens, {size / 1e9:.2f} GB in {folder}.")
    capture = StateCapture(target, draft.config.target_layer_ids, with_final=final_width > 0)
    bar = tqdm(total=len(training), desc="target states", unit="record", disable=not is_main_process())
    # The main process builds the cache, the others wait and then read it.
    with bar, PartialState().main_process_first():
        build_state_cache(folder, training, capture, description, on_batch=lambda done: bar.update(done - bar.n))
    return CachedStates(folder)


def _objective(
    settings: TrainingSettings, target: Target, draft: DFlashDraftModel, training: list[Record]
) -> Objective:
    """Make the loss, with the most frequent response tokens as its vocabulary if `loss_vocabulary` is set."""
    frequent = None
    if settings.loss_vocabulary is not None and settings.loss_vocabulary < target.num_embeddings:
        frequent = response_token_counts(training, target.num_embeddings).topk(settings.loss_vocabulary).indices
    return Objective(draft, target, settings, frequent)


def _make_trainer(
    settings: TrainingSettings,
    arguments: Any,
    target: Target,
    draft: DFlashDraftModel,
    objective: Objective,
    training: list[Record],
    held_out: list[Record],
    states: CachedStates | None,
) -> tuple[Any, Any]:
    from hf_dflash.training.trainer import CompleteCheckpoints, DraftTrainer, StopOnInterrupt

    interrupt = StopOnInterrupt()
    trainer = DraftTrainer(
        draft=draft,
        target=target,
        objective=objective,
        arguments=arguments,
        train_records=RecordDataset(training, states),
        held_out=held_out,
        callbacks=[interrupt, CompleteCheckpoints(settings.keep)],
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
    """Save the trained draft in bfloat16, the dtype that drafts run in, and then evaluate it."""
    out = Path(settings.out)
    folder = out / DRAFT_FOLDER
    draft = draft.eval().to(torch.bfloat16)
    if is_main_process():
        save_draft(draft, folder, settings.layout)
    measured, real = None, None
    if held_out:
        measured = measure_acceptance(draft, target, [(list(r.prompt_ids), list(r.response_ids)) for r in held_out])
        shares = " ".join(f"{share:.2f}" for share in measured.by_position)
        log(f"Held-out records: tau {measured.tau:.2f}; acceptance by position {shares}.")
    try:
        real = _real_tau(settings, target, draft, held_out)
    except DFlashError as error:
        log(f"tau of generate() was not measured: {error}")
    if real is not None:
        log(f"generate() on {min(settings.final_prompts, len(held_out))} held-out prompts: tau {real:.2f}.")
    report = {
        "steps": steps,
        "held_out_tau": measured and round(measured.tau, 4),
        "held_out_accepted": measured and [round(share, 4) for share in measured.by_position],
        "real_tau": real and round(real, 4),
    }
    if is_main_process():
        atomic_write(out / REPORT_FILE, json.dumps(report, indent=2) + "\n")
        record_made(out, [REPORT_FILE])
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
