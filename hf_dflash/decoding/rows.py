"""The rows of a batch, decoded one after the other.

Owns: what of a call's prepared arguments belongs to one row, and the refusal of what cannot be told apart by rows.

Does not know: how a row is decoded.
"""

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache import CACHE_KEYWORD, tokens_in

#: Arguments whose rows are the batch's rows; position ids may carry leading axes (M-RoPE) and are cut along their last
#: but one.
ROW_ARGUMENTS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "inputs_embeds")

#: Processors that keep something per row of the whole batch, so that they cannot be shown one row.
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
    """The model arguments of one row.

    Args:
        model_kwargs: of the whole batch; not changed.
        row: which row.
        num_rows: rows of the batch. With one row the arguments are its own; with several, each row gets a cache of its
            own.

    Raises:
        UnsupportedOptionError: several rows with a filled cache or with inputs that are not laid out by rows (images).
    """
    if num_rows == 1:
        return dict(model_kwargs)
    own: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if name == CACHE_KEYWORD:
            own[name] = _empty_copy(value, num_rows)
        elif name == "position_ids" and value is not None:
            own[name] = value[..., row : row + 1, :]
        elif name in ROW_ARGUMENTS and value is not None:
            own[name] = value[row : row + 1]
        elif isinstance(value, torch.Tensor) or (isinstance(value, dict) and value):
            raise UnsupportedOptionError(
                f"`{name}` was given for a batch of {num_rows} rows, and which part of it belongs to which row "
                "cannot be told. With a DFlash draft, call generate once per row for multimodal inputs (and without "
                "num_return_sequences)."
            )
        else:
            own[name] = value
    return own


def _empty_copy(cache: Any, num_rows: int) -> Any:
    if tokens_in(cache) != 0:
        raise UnsupportedOptionError(
            f"`{CACHE_KEYWORD}` holds {tokens_in(cache)} tokens of {num_rows} rows. Rows are decoded one after the "
            "other, and a filled cache cannot be split; continue each row on a cache of its own."
        )
    return copy.deepcopy(cache)


def row_processors(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """The logits processors as one row must see them.

    `prefix_allowed_tokens_fn(batch_id, ids)` is called with the row's own number, though it is shown one row at a time.

    Raises:
        UnsupportedOptionError: several rows with a processor that keeps a state for each of them.
    """
    if num_rows == 1:
        return processors
    own = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, BATCH_PROCESSORS):
            raise UnsupportedOptionError(
                f"{type(processor).__name__} keeps a state per row and was given a batch of {num_rows} rows, which a "
                "DFlash draft decodes one after the other. Call generate once per row."
            )
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            processor = PrefixConstrainedLogitsProcessor(lambda _, ids, allowed=allowed: allowed(row, ids), 1)
        own.append(processor)
    return own


def refuse_early_rows(criteria: StoppingCriteriaList, num_rows: int) -> None:
    """Reject several rows that can stop at different lengths without an end-of-sequence token.

    Plain generate pads a finished row only where it knows an end-of-sequence token; without one it goes on writing real
    tokens in it until the last row has finished.
    """
    plain = all(type(c) is MaxLengthCriteria for c in criteria)
    if num_rows > 1 and not plain and not any(isinstance(c, EosTokenCriteria) for c in criteria):
        raise UnsupportedOptionError(
            f"A batch of {num_rows} rows with stopping criteria and without `eos_token_id`: plain generate keeps "
            "writing in rows that have stopped, which decoding row by row cannot repeat. Set eos_token_id, or call "
            "generate once per row."
        )


def prompt_length(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> int:
    """Tokens of the prompt, whether it came as ids or as embeddings."""
    embeds = model_kwargs.get("inputs_embeds")
    return max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])


def padding_before(attention_mask: torch.Tensor | None, read: int) -> int:
    """Padding among the first `read` tokens of a `(1, length)` mask; no mask means no padding."""
    return 0 if attention_mask is None else int((attention_mask[0, :read] == 0).sum())
