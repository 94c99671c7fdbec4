"""Splitting a batch into rows, and what is refused because it cannot be split."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_dflash import UnsupportedOptionError
from hf_dflash.decoding.rows import (
    PER_ROW_ATTRIBUTE,
    PER_ROW_PROCESSORS,
    padding_before,
    prompt_length,
    refuse_batch,
    row_kwargs,
    row_processors,
)
from hf_dflash.target.cache import CACHE_KEYWORD
from hf_dflash.target.rope import LengthDependentRope


def batch_kwargs():
    return {
        CACHE_KEYWORD: DynamicCache(),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2], [7, 8, 9]]),
        "inputs_embeds": torch.arange(12.0).view(2, 3, 2),
        "token_type_ids": torch.tensor([[0, 0, 0], [1, 1, 0]]),
        "logits_to_keep": 1,
        "use_cache": True,
        "mm_token_type_ids": None,
    }


def test_each_row_gets_its_own_slice():
    kwargs = batch_kwargs()
    row = row_kwargs(kwargs, 1, 2)
    assert row["attention_mask"].tolist() == [[0, 1, 1]]
    assert row["position_ids"].tolist() == [[7, 8, 9]]
    assert row["inputs_embeds"].tolist() == [[[6, 7], [8, 9], [10, 11]]]
    assert row["token_type_ids"].tolist() == [[1, 1, 0]]
    assert (row["logits_to_keep"], row["use_cache"], row["mm_token_type_ids"]) == (1, True, None)
    assert row[CACHE_KEYWORD] is not kwargs[CACHE_KEYWORD] and len(row[CACHE_KEYWORD].layers) == 0


def test_three_dimensional_positions_are_sliced_along_the_batch():
    kwargs = batch_kwargs() | {"position_ids": torch.arange(18).view(3, 2, 3)}
    assert row_kwargs(kwargs, 1, 2)["position_ids"].tolist() == [[[3, 4, 5]], [[9, 10, 11]], [[15, 16, 17]]]


def test_one_row_keeps_its_arguments_and_its_cache():
    kwargs = batch_kwargs()
    row = row_kwargs(kwargs, 0, 1)
    assert row == kwargs and row is not kwargs and row[CACHE_KEYWORD] is kwargs[CACHE_KEYWORD]


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
def test_inputs_that_cannot_be_split_by_row_are_refused(name):
    with pytest.raises(UnsupportedOptionError, match=name):
        row_kwargs(batch_kwargs() | {name: torch.zeros(4, 3)}, 0, 2)


def test_encoded_images_of_several_rows_are_refused():
    with pytest.raises(UnsupportedOptionError, match="mm_encoder_outputs"):
        row_kwargs(batch_kwargs() | {"mm_encoder_outputs": {"image": object()}}, 0, 2)
    assert row_kwargs(batch_kwargs() | {"mm_encoder_outputs": {}}, 0, 2)["mm_encoder_outputs"] == {}


def test_a_filled_cache_of_several_rows_is_refused():
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4), 0)
    with pytest.raises(UnsupportedOptionError, match="5 tokens of 2 rows"):
        row_kwargs(batch_kwargs() | {CACHE_KEYWORD: cache}, 0, 2)


def test_prompt_length_and_padding():
    assert prompt_length(torch.zeros(1, 4), {}) == 4
    assert prompt_length(torch.zeros(1, 0), {"inputs_embeds": torch.zeros(1, 6, 2)}) == 6
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert [padding_before(mask, n) for n in (0, 1, 4)] == [0, 1, 2] and padding_before(None, 3) == 0


# What cannot be decoded row by row

PLAIN = GenerationConfig(max_length=50, do_sample=False)
ANY_LENGTH = LengthDependentRope()


def refuse(config=PLAIN, kwargs=None, processors=(), criteria=(), rope=ANY_LENGTH, rows=2):
    criteria = [MaxLengthCriteria(50), EosTokenCriteria(1), *criteria]
    refuse_batch(rows, config, kwargs or {}, LogitsProcessorList(processors), StoppingCriteriaList(criteria), rope)


def test_a_sampled_batch_is_refused_and_a_sampled_row_is_not():
    with pytest.raises(UnsupportedOptionError, match=r"`do_sample=True` .* 2 rows\. .*once per row"):
        refuse(GenerationConfig(max_length=50, do_sample=True))
    with pytest.raises(UnsupportedOptionError, match=r"3 rows \(num_return_sequences=3\)"):
        refuse(GenerationConfig(max_length=50, do_sample=True, num_return_sequences=3), rows=3)
    refuse(GenerationConfig(max_length=50, do_sample=True), rows=1)


def test_a_cache_of_the_callers_is_refused_and_one_of_cores_is_not():
    cache = DynamicCache()
    refuse(kwargs={CACHE_KEYWORD: cache})
    cache._is_user_defined = True
    with pytest.raises(UnsupportedOptionError, match=rf"`{CACHE_KEYWORD}` was given for a batch of 2 rows"):
        refuse(kwargs={CACHE_KEYWORD: cache})


class Budget(LogitsProcessor):
    """Counts its calls."""

    def __call__(self, input_ids, scores):
        return scores


class AnyRow(StoppingCriteria):
    """Stops for all rows when one is done."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), False)


class Cooler(TemperatureLogitsWarper):
    """A subclass may do anything."""


def function_processor(input_ids, scores):
    return scores


@pytest.mark.parametrize("each", [Budget(), AnyRow(), Cooler(0.5), function_processor, MaxTimeCriteria(9.0)])
def test_unknown_classes_are_refused_by_name_unless_they_declare_themselves_per_row(each):
    criteria = [each] if isinstance(each, StoppingCriteria) else []
    processors = [] if criteria else [each]
    name = getattr(each, "__qualname__", type(each).__name__)
    with pytest.raises(UnsupportedOptionError, match=rf"^{name} was given for a batch of 2 rows.*once per row"):
        refuse(processors=processors, criteria=criteria)
    refuse(processors=processors, criteria=criteria, rows=1)
    each.dflash_per_row = True
    try:
        refuse(processors=processors, criteria=criteria)
    finally:
        del each.dflash_per_row


def test_the_advice_for_transformers_own_classes_does_not_name_the_attribute():
    with pytest.raises(UnsupportedOptionError, match=r"AlternatingCodebooksLogitsProcessor (?!.*dflash_per_row)"):
        refuse(processors=[logits_process.AlternatingCodebooksLogitsProcessor(0, 4, 4)])
    with pytest.raises(UnsupportedOptionError, match=PER_ROW_ATTRIBUTE):
        refuse(processors=[Budget()])


EOS = {"eos_token_id": 2, "device": "cpu"}
#: Every processor that may be called row by row, with arguments that make it change something.
KNOWN = {
    "EpsilonLogitsWarper": {"epsilon": 0.05},
    "EtaLogitsWarper": {"epsilon": 0.05},
    "ExponentialDecayLengthPenalty": {
        "exponential_decay_length_penalty": (1, 1.5),
        "eos_token_id": 2,
        "input_ids_seq_length": 4,
    },
    "ForcedBOSTokenLogitsProcessor": {"bos_token_id": 1},
    "ForcedEOSTokenLogitsProcessor": {"max_length": 8, **EOS},
    "InfNanRemoveLogitsProcessor": {},
    "LogitNormalization": {},
    "MinLengthLogitsProcessor": {"min_length": 7, **EOS},
    "MinNewTokensLengthLogitsProcessor": {"prompt_length_to_skip": 4, "min_new_tokens": 3, **EOS},
    "MinPLogitsWarper": {"min_p": 0.3},
    "NoBadWordsLogitsProcessor": {"bad_words_ids": [[3], [4, 5]], "eos_token_id": 2},
    "NoRepeatNGramLogitsProcessor": {"ngram_size": 2},
    "PrefixConstrainedLogitsProcessor": {
        "prefix_allowed_tokens_fn": lambda row, ids: [row, int(ids[-1])],
        "num_beams": 1,
    },
    "RepetitionPenaltyLogitsProcessor": {"penalty": 1.7},
    "SequenceBiasLogitsProcessor": {"sequence_bias": {(3,): 4.0, (4, 5): -3.0}},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": [3, 4], "begin_index": 4},
    "SuppressTokensLogitsProcessor": {"suppress_tokens": [3, 4]},
    "TemperatureLogitsWarper": {"temperature": 0.7},
    "TopHLogitsWarper": {"top_h": 0.4},
    "TopKLogitsWarper": {"top_k": 3},
    "TopPLogitsWarper": {"top_p": 0.5},
    "TypicalLogitsWarper": {"mass": 0.5},
    "WatermarkLogitsProcessor": {"vocab_size": 12, "device": "cpu"},
}


@pytest.mark.parametrize("name", [processor.__name__ for processor in PER_ROW_PROCESSORS])
def test_every_known_processor_gives_each_row_what_it_has_in_the_batch(name):
    """Over six steps, so that state would show; rows are processed one after the other, as they are decoded."""
    make = getattr(logits_process, name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 12, (3, 10), generator=generator)
    scores = torch.randn(6, 3, 12, generator=generator) * 3
    together, by_row = make(**KNOWN[name]), LogitsProcessorList([make(**KNOWN[name])])
    refuse(processors=by_row, rows=3)
    expected = [together(ids[:, : 4 + step], scores[step].clone()) for step in range(6)]
    for row in range(3):
        processors = row_processors(by_row, row, 3)
        for step in range(6):
            result = processors(ids[row : row + 1, : 4 + step], scores[step, row : row + 1].clone())
            assert torch.equal(result[0], expected[step][row]), (row, step)


def test_a_repetition_penalty_ignores_the_padding_of_its_row():
    processor = logits_process.RepetitionPenaltyLogitsProcessor(1.5)
    processor.prompt_ignore_length = torch.tensor([2, 0, 3])
    rows = [row_processors(LogitsProcessorList([processor]), row, 3)[0] for row in range(3)]
    assert [row.prompt_ignore_length.tolist() for row in rows] == [[2], [0], [3]]
    assert processor.prompt_ignore_length.tolist() == [2, 0, 3]
    processor.prompt_ignore_length = 4
    assert row_processors(LogitsProcessorList([processor]), 1, 3)[0].prompt_ignore_length == 4


def test_a_batch_whose_rows_would_have_other_frequencies_is_refused():
    switch, drift = LengthDependentRope(switches=frozenset({32})), LengthDependentRope(drifts_after=32)
    ragged = {"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    positions = {"position_ids": torch.tensor([[0, 1, 2], [7, 8, 9]])}
    for rope, kwargs in ((switch, ragged), (switch, positions), (drift, ragged), (drift, {})):
        with pytest.raises(UnsupportedOptionError, match="2 rows of up to 50 tokens"):
            refuse(kwargs=kwargs, rope=rope)
        refuse(GenerationConfig(max_length=32), kwargs, rope=rope)
    refuse(kwargs={"position_ids": torch.tensor([[0, 1, 2], [0, 1, 2]])}, rope=switch)
    embeds = {"inputs_embeds": torch.zeros(2, 20, 4)}
    with pytest.raises(UnsupportedOptionError, match="up to 40 tokens"):
        refuse(GenerationConfig(max_length=20), embeds, rope=drift)
