"""Splits a batch into rows, which are decoded one at a time, and rejects arguments that cannot be split."""

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache import CACHE_KEYWORD, tokens_in

#: Arguments whose first dimension is the batch. Position ids may have leading dimensions (M-RoPE) and are sliced along
#: the second to last.
ROW_ARGUMENTS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "inputs_embeds")

#: Processors that keep state for every row of the batch, so they cannot be called on a single row.
BATCH_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
    )
)


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
    """Return the logits processors for one row.

    `prefix_allowed_tokens_fn(batch_id, ids)` still receives the row's index in the batch as `batch_id`.

    Raises:
        UnsupportedOptionError: several rows with a processor that keeps state for each of them.
    """
    if num_rows == 1:
        return processors
    row_list = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, BATCH_PROCESSORS):
            raise UnsupportedOptionError(
                f"{type(processor).__name__} keeps state per row, but with a DFlash draft the {num_rows} rows of a "
                "batch are decoded one at a time. Call generate once per row."
            )
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            processor = PrefixConstrainedLogitsProcessor(lambda _, ids, allowed=allowed: allowed(row, ids), 1)
        row_list.append(processor)
    return row_list


def refuse_stops_without_eos(criteria: StoppingCriteriaList, num_rows: int) -> None:
    """Reject several rows that can stop at different lengths without an end-of-sequence token.

    Plain generate pads finished rows only if an end-of-sequence token is set. Without one it keeps generating real
    tokens for them until the last row has finished.
    """
    plain = all(type(c) is MaxLengthCriteria for c in criteria)
    if num_rows > 1 and not plain and not any(isinstance(c, EosTokenCriteria) for c in criteria):
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
