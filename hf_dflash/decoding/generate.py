"""`DFlashGenerate`, the `custom_generate` callable through which `generate` reaches the decoding loop.

It rejects options that cannot be honored, splits a batch into rows, and joins their results. `assistant_model=` is
dispatched to it by `hf_dflash.decoding.dispatch`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_dflash.decoding.drafting import DFlashCandidateGenerator, draft_context
from hf_dflash.decoding.loop import decode
from hf_dflash.decoding.options import refuse_options, resolve_block_size
from hf_dflash.decoding.rows import padding_before, prompt_length, refuse_batch, row_kwargs, row_processors
from hf_dflash.decoding.statistics import DFlashOutput, DFlashStatistics, RoundTrace
from hf_dflash.decoding.text import Continuation
from hf_dflash.draft.errors import DraftDtypeError, UnsupportedOptionError
from hf_dflash.draft.loading import check_pairing
from hf_dflash.draft.modeling_dflash import FP16_REASON, DFlashDraftModel
from hf_dflash.target.cache import CACHE_KEYWORD, TargetCache, tokens_in
from hf_dflash.target.probe import check_block_reading
from hf_dflash.target.processes import Agreement, Lockstep, agreement_for
from hf_dflash.target.rope import length_dependent_rope
from hf_dflash.target.target import Target


@dataclass(frozen=True)
class DFlashGenerate:
    """A decoding method for `generate(custom_generate=...)` that drafts with a DFlash draft.

    `target.generate(**inputs, assistant_model=draft)` is the same as
    `target.generate(**inputs, custom_generate=DFlashGenerate(draft))`.

    Args:
        draft: the draft, from `hf_dflash.load_draft`.
        block_size: tokens per block, anchor included, from 2 to the checkpoint's block size, which is the default.
            `block_size=` or `num_assistant_tokens=` (one less) in the call takes precedence.
        stats: called once per `generate` with the call's `DFlashStatistics`.
        trace: JSON-lines file; one line is appended per round.
        streamer, synced: set by the dispatch, since core does not pass the streamer and `synced_gpus` to custom
            decoding methods.
    """

    draft: DFlashDraftModel
    block_size: int | None = None
    stats: Callable[[DFlashStatistics], None] | None = None
    trace: str | Path | None = None
    streamer: BaseStreamer | None = None
    synced: bool = False

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        block_size: int | None = None,
        stats: Callable[[DFlashStatistics], None] | None = None,
        trace: str | Path | None = None,
        **model_kwargs: Any,
    ) -> DFlashOutput | torch.LongTensor:
        """Decode from the inputs that core prepared; the signature is that of core's decoding methods.

        Raises:
            UnsupportedOptionError: an option cannot be honored; raised before the first forward.
            PairingError: draft and target do not match; raised before the first forward.
            DraftDtypeError: a weight of the draft is float16; raised before the first forward.
            UnsupportedTargetError: part of the target cannot be tapped, used or rolled back; raised before the first
                token.
        """
        stats, trace = stats or self.stats, trace or self.trace
        statistics = DFlashStatistics(synchronize=stats is not None or trace is not None)
        num_rows, target_class = input_ids.shape[0], type(model).__name__
        try:
            refuse_options(generation_config, model_kwargs, num_rows, self.streamer, self.synced, target_class)
            target, rope = Target(model), length_dependent_rope(model)
            refuse_batch(num_rows, generation_config, model_kwargs, logits_processor, stopping_criteria, rope)
            call = _Call(
                draft=self.draft,
                target=target,
                block_size=resolve_block_size(self.draft.config, block_size or self.block_size),
                generation_config=generation_config,
                statistics=statistics,
                streamer=self.streamer,
                lockstep=Lockstep(target, self.synced),
                agree=agreement_for(model),
            )
            check_pairing(self.draft, target)
            config = self.draft.config
            target.refuse_other_widths(embedding=not config.own_embeddings, head=not config.draft_vocab_size)
            _refuse_unusable_weights(self.draft)
            with statistics.whole(), _eval_mode(self.draft), RoundTrace(trace) as rounds:
                rows = [
                    call.decode_row(row, input_ids, logits_processor, stopping_criteria, model_kwargs, rounds)
                    for row in range(num_rows)
                ]
                call.lockstep.run_until_all_finish()
        finally:
            if self.streamer is not None:
                self.streamer.end()
        if stats is not None:
            stats(statistics)
        return call.join(rows)


def _refuse_unusable_weights(draft: DFlashDraftModel) -> None:
    """Reject float16 weights (casting a submodule bypasses the draft's own dtype guard) and offloaded ones."""
    for name, parameter in draft.named_parameters():
        if parameter.dtype == torch.float16:
            raise DraftDtypeError(FP16_REASON)
        if parameter.is_meta:
            raise UnsupportedOptionError(
                f"The draft's weight {name} is offloaded (on the meta device). Loading it again every round would "
                "cost more than drafting saves. Load the draft onto a single device; the target may be offloaded."
            )


@contextmanager
def _eval_mode(draft: DFlashDraftModel) -> Iterator[None]:
    """Put a draft in training mode into eval mode (no dropout) and restore it afterwards."""
    if not draft.training:
        yield
        return
    draft.eval()
    try:
        yield
    finally:
        draft.train()


@dataclass
class _Row:
    """One finished row: its text and its transformers cache."""

    text: Continuation
    cache: Any


@dataclass
class _Call:
    """State shared by the rows of one `generate` call."""

    draft: DFlashDraftModel
    target: Target
    block_size: int
    generation_config: GenerationConfig
    statistics: DFlashStatistics
    streamer: BaseStreamer | None
    lockstep: Lockstep
    agree: Agreement

    def decode_row(
        self,
        row: int,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        model_kwargs: dict[str, Any],
        trace: RoundTrace,
    ) -> _Row:
        """Decode one row of the batch on its own, keeping its padding."""
        num_rows = input_ids.shape[0]
        model_kwargs = row_kwargs(model_kwargs, row, num_rows)
        cache = model_kwargs[CACHE_KEYWORD]
        text = Continuation(
            input_ids[row : row + 1],
            row_processors(logits_processor, row, num_rows),
            stopping_criteria,
            self.generation_config,
            self.streamer,
            self.agree,
        )
        num_cached = tokens_in(cache)
        max_length = (num_cached or 0) + prompt_length(input_ids, model_kwargs) + text.remaining_tokens
        padding = padding_before(model_kwargs.get("attention_mask"), num_cached or 0)
        context = draft_context(self.draft, cache, None if num_cached is None else num_cached - padding, max_length)
        generator = DFlashCandidateGenerator(self.draft, self.target, context, self.agree)
        target_cache = TargetCache(cache, self.target.model, max_length=max_length, block_size=self.block_size)
        check_block_reading(self.target, model_kwargs, input_ids.device, max_length)
        with target_cache, self.target.taps(self.draft.config.target_layer_ids) as taps:
            decode(
                self.target,
                generator,
                text,
                target_cache,
                taps,
                self.lockstep,
                block_size=self.block_size,
                generation_config=self.generation_config,
                model_kwargs=model_kwargs,
                statistics=self.statistics,
                trace=trace,
                row=row,
            )
        return _Row(text, target_cache.cache)

    def join(self, rows: list[_Row]) -> DFlashOutput | torch.LongTensor:
        """Join the rows as plain generate returns them: right-padded to the longest row."""
        length = max(row.text.ids.shape[1] for row in rows)
        ids = [row.text.ids for row in rows]
        if any(row_ids.shape[1] < length for row_ids in ids):
            pad = int(self.generation_config._pad_token_tensor)
            ids = [torch.nn.functional.pad(row_ids, (0, length - row_ids.shape[1]), value=pad) for row_ids in ids]
        sequences = torch.cat(ids, dim=0)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        records = rows[0].text.records
        return DFlashOutput(
            sequences=sequences,
            scores=records.scores,
            logits=records.logits,
            hidden_states=records.hidden_states,
            attentions=records.attentions,
            dflash_stats=self.statistics,
            **({CACHE_KEYWORD: rows[0].cache} if len(rows) == 1 else {}),
        )
