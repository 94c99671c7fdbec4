"""Splits a batch into rows, which are decoded one at a time, and rejects what cannot be split."""

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache import CACHE_KEYWORD, tokens_in
from hf_dflash.target.rope import LengthDependentRope

#: Arguments whose first dimension is the batch. Position ids may have leading dimensions (M-RoPE) and are sliced along
#: the second to last.
ROW_ARGUMENTS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "inputs_embeds")

#: Attribute by which a logits processor or a stopping criterion declares that it may be called row by row: its result
#: for a row depends on nothing but the ids and scores of that row, in the same call. Documented in docs/exactness.md.
PER_ROW_ATTRIBUTE = "dflash_per_row"

#: transformers' own processors of which that is known. Others keep state per row (SynthID), run the model on the whole
#: batch (classifier-free guidance), or belong to other modalities.
PER_ROW_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    )
)

#: transformers' own stopping criteria of which that is known. `MaxTimeCriteria` measures the whole batch.
PER_ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def row_kwargs(model_kwargs: dict[str, Any], row: int, num_rows: int) -> dict[str, Any]:
    """Return the model arguments of one row.

    Args:
        model_kwargs: the arguments of the whole batch; not modified.
        row: index of the row.
        num_rows: rows in the batch. A single row keeps its arguments and cache; with several, each row gets its own
            empty cache.

    Raises:
        UnsupportedOptionError: several rows with a filled cache or with inputs that are not split by row (images).
    """
    if num_rows == 1:
        return dict(model_kwargs)
    kwargs: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if name == CACHE_KEYWORD:
            kwargs[name] = _empty_copy(value, num_rows)
        elif name == "position_ids" and value is not None:
            kwargs[name] = value[..., row : row + 1, :]
        elif name in ROW_ARGUMENTS and value is not None:
            kwargs[name] = value[row : row + 1]
        elif isinstance(value, torch.Tensor) or (isinstance(value, dict) and value):
            raise UnsupportedOptionError(
                f"`{name}` was given for a batch of {num_rows} rows and cannot be split by row. With a DFlash draft, "
                "call generate once per row for multimodal inputs (and without num_return_sequences)."
            )
        else:
            kwargs[name] = value
    return kwargs


def _empty_copy(cache: Any, num_rows: int) -> Any:
    if tokens_in(cache) != 0:
        raise UnsupportedOptionError(
            f"`{CACHE_KEYWORD}` holds {tokens_in(cache)} tokens of {num_rows} rows. Rows are decoded one at a time, "
            "and a filled cache cannot be split. Call generate once per row, each with its own cache."
        )
    return copy.deepcopy(cache)


def row_processors(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """Return the logits processors for one row; `refuse_batch` has rejected those that cannot be called on one.

    `prefix_allowed_tokens_fn(batch_id, ids)` still receives the row's index in the batch as `batch_id`. A repetition
    penalty that ignores the padding of each row gets that of this one.
    """
    if num_rows == 1:
        return processors
    row_list = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            processor = PrefixConstrainedLogitsProcessor(lambda _, ids, allowed=allowed: allowed(row, ids), 1)
        elif isinstance(processor, RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            if isinstance(ignored, torch.Tensor) and ignored.shape[0] == num_rows:
                processor = copy.copy(processor)
                processor.prompt_ignore_length = ignored[row : row + 1]
        row_list.append(processor)
    return row_list


def refuse_batch(
    num_rows: int,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    rope: LengthDependentRope,
) -> None:
    """Reject a batch whose rows, decoded one at a time, would not be those of plain generate.

    Args:
        num_rows: rows in the batch, after `num_return_sequences`. A single row is never rejected.
        config, model_kwargs, processors, criteria: as prepared by core.
        rope: where the frequencies of the target's RoPE change with the length.

    Raises:
        UnsupportedOptionError: naming the option or the class, and what to do instead.
    """
    if num_rows == 1:
        return
    if config.do_sample:
        copies = (
            f" (num_return_sequences={config.num_return_sequences})" if (config.num_return_sequences or 1) > 1 else ""
        )
        raise UnsupportedOptionError(
            f"`do_sample=True` was given for a batch of {num_rows} rows{copies}. Plain generate draws the next tokens "
            "of all rows together, so rows that are decoded one at a time would not get its text for the seed. Call "
            "generate once per row: each call gives what plain generate gives for that row and seed. Or set "
            "do_sample=False."
        )
    if getattr(model_kwargs.get(CACHE_KEYWORD), "_is_user_defined", False):
        raise UnsupportedOptionError(
            f"`{CACHE_KEYWORD}` was given for a batch of {num_rows} rows. Each row is decoded with a cache of its own, "
            "so yours would stay as it is. Leave it out, or call generate once per row, each with its own cache."
        )
    _refuse_stops_without_eos(criteria, num_rows)
    for known, each in [(PER_ROW_CRITERIA, c) for c in criteria] + [(PER_ROW_PROCESSORS, p) for p in processors]:
        if type(each) not in known and not getattr(each, PER_ROW_ATTRIBUTE, False):
            _refuse_class(each, num_rows)
    _refuse_other_frequencies(num_rows, config, model_kwargs, rope)


def _refuse_class(each: Any, num_rows: int) -> None:
    """Reject a logits processor or a stopping criterion that is not known to treat every row on its own."""
    name = getattr(each, "__qualname__", type(each).__name__)
    advice = (
        f"If its result for a row depends on nothing but the ids and scores of that row, set `{PER_ROW_ATTRIBUTE} = "
        "True` on its class. Otherwise call generate once per row."
    )
    if type(each).__module__.startswith("transformers."):
        advice = "Call generate once per row."
    raise UnsupportedOptionError(
        f"{name} was given for a batch of {num_rows} rows. With a DFlash draft rows are decoded one at a time, and "
        f"{name} is not known to treat every row on its own (it may count calls, keep a state per row, or stop for all "
        f"rows at once). {advice}"
    )


def _refuse_other_frequencies(
    num_rows: int, config: GenerationConfig, model_kwargs: dict[str, Any], rope: LengthDependentRope
) -> None:
    """Reject rows whose RoPE would have other frequencies than in a batch, where the longest row sets them for all."""
    embeds = model_kwargs.get("inputs_embeds")
    longest = config.max_length + (0 if embeds is None else embeds.shape[1])
    if not rope or longest <= rope.first_change:
        return
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    ragged = mask is not None and bool((mask == 0).any())
    ragged = ragged or (position_ids is not None and bool((position_ids[..., -1] != position_ids[..., :1, -1]).any()))
    if ragged or rope.drifts_after is not None:
        raise UnsupportedOptionError(
            f"A batch of {num_rows} rows of up to {longest} tokens: the RoPE of this target changes its frequencies "
            f"beyond {rope.first_change} tokens, and in a batch the longest row does so for all. Call generate once "
            f"per row, or keep the texts within {rope.first_change} tokens."
        )


def _refuse_stops_without_eos(criteria: StoppingCriteriaList, num_rows: int) -> None:
    """Reject several rows that can stop at different lengths without an end-of-sequence token.

    Plain generate pads finished rows only if an end-of-sequence token is set. Without one it keeps generating real
    tokens for them until the last row has finished.
    """
    plain = all(type(c) is MaxLengthCriteria for c in criteria)
    if not plain and not any(isinstance(c, EosTokenCriteria) for c in criteria):
        raise UnsupportedOptionError(
            f"A batch of {num_rows} rows has stopping criteria but no `eos_token_id`: plain generate keeps generating "
            "for rows that have already stopped, which row-by-row decoding cannot reproduce. Set eos_token_id, or "
            "call generate once per row."
        )


def prompt_length(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> int:
    """Return the prompt's length in tokens, whether given as ids or as embeddings."""
    embeds = model_kwargs.get("inputs_embeds")
    return max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])


def padding_before(attention_mask: torch.Tensor | None, end: int) -> int:
    """Count the padding among the first `end` tokens of a `(1, length)` mask; no mask means no padding."""
    return 0 if attention_mask is None else int((attention_mask[0, :end] == 0).sum())
