"""`Continuation`: which tokens of a block are committed, and what is recorded for each."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import ModelOutput

from hf_dflash import UnsupportedOptionError
from hf_dflash.decoding.text import Continuation, Records, _attention_row


def logits_for(*tokens, vocabulary=10):
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocabulary).float()


def text(criteria=(), processors=(), max_length=20, **config):
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length), *criteria])
    return Continuation(torch.tensor([[1, 2]]), LogitsProcessorList(processors), criteria, GenerationConfig(**config))


class Counting:
    """A processor that changes nothing, but forces token-by-token decisions."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    "candidates,accepted,committed",
    [([3, 4, 5], 3, [3, 4, 5, 6]), ([3, 9, 5], 1, [3, 4]), ([9, 4, 5], 0, [3]), ([], 0, [3])],
)
def test_accepting_a_block(one_by_one, candidates, accepted, committed):
    counting = Counting()
    continuation = text(processors=[counting] if one_by_one else [])
    candidates = torch.tensor([candidates], dtype=torch.long)
    logits = logits_for(3, 4, 5, 6)[:, : candidates.shape[1] + 1]
    got_accepted, got_committed = continuation.accept(logits, candidates)
    assert (got_accepted.tolist(), got_committed.tolist()) == ([accepted], [len(committed)])
    assert continuation.ids.tolist() == [[1, 2, *committed]]
    assert counting.calls == (len(committed) if one_by_one else 0)
    assert continuation.remaining_tokens == 18 - len(committed)
    assert continuation.anchor_ids.tolist() == [committed[-1]]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_stop_inside_a_block_cuts_it(one_by_one):
    continuation = text([EosTokenCriteria(4)], [Counting()] if one_by_one else [])
    accepted, committed = continuation.accept(logits_for(3, 4, 5, 6), torch.tensor([[3, 4, 5]]))
    assert continuation.ids.tolist() == [[1, 2, 3, 4]] and continuation.finished
    assert (accepted.tolist(), committed.tolist()) == ([2], [2])


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("usable, committed", [(0, []), (1, [3]), (2, [3, 4]), (3, [3, 4, 5]), (4, [3, 4, 5, 6])])
def test_a_block_is_used_up_to_its_first_nan_logits(one_by_one, usable, committed):
    continuation = text(processors=[Counting()] if one_by_one else [])
    logits = logits_for(3, 4, 5, 6)
    logits[:, usable:] = torch.nan
    accepted, taken = continuation.accept(logits, torch.tensor([[3, 4, 5]]))
    assert (accepted.tolist(), taken.tolist()) == ([max(0, usable - 1)], [usable])
    assert continuation.ids.tolist() == [[1, 2, *committed]]


def test_nan_logits_of_a_lone_anchor_are_decided_as_in_plain_generate():
    continuation = text()
    continuation.accept(torch.full((1, 1, 10), torch.nan), torch.empty(1, 0, dtype=torch.long))
    assert continuation.ids.tolist() == [[1, 2, 0]]


def test_equal_logits_go_to_the_first_token_either_way():
    tied = torch.zeros(1, 1, 10)
    for processors in ([], [Counting()]):
        continuation = text(processors=processors)
        continuation.accept(tied, torch.zeros(1, 0, dtype=torch.long))
        assert continuation.ids.tolist() == [[1, 2, 0]]


def test_records_hold_one_entry_per_token():
    continuation = text(return_dict_in_generate=True, output_scores=True, output_logits=True)
    continuation.accept(logits_for(3, 4, 5), torch.tensor([[3, 9]]))
    assert [s.argmax().item() for s in continuation.records.scores] == [3, 4]
    assert len(continuation.records.logits) == 2 and continuation.records.attentions is None


@pytest.mark.parametrize(
    "window,position,columns", [(None, 0, [0, 5]), (None, 2, [0, 7]), (4, 1, [3, 7]), (4, 0, [2, 6]), (9, 1, [0, 7])]
)
def test_the_attention_row_of_one_token(window, position, columns):
    """A block of 3 after 5 cached keys: position p would have seen the keys up to 5 + p, limited to its window."""
    attention = torch.arange(8.0).expand(1, 1, 3, 8)
    row = _attention_row(attention, position, window)
    end = 5 + position + 1
    start = 0 if window is None else max(0, end - window)
    assert row.flatten().tolist() == list(range(start, end))
    assert row.shape == (1, 1, 1, end - start) and columns[0] == start


def test_missing_attentions_are_none_and_a_wrong_count_is_refused():
    records = Records(attentions=())
    records.add_block(ModelOutput(attentions=(None, None)), 2, [None, 4])
    assert records.attentions == ((None, None), (None, None))
    with pytest.raises(UnsupportedOptionError, match="2 attentions for 3"):
        records.add_block(ModelOutput(attentions=(None, None)), 1, [None, 4, 4])


def test_attentions_that_the_implementation_does_not_compute_are_refused_with_what_does():
    for attentions in ((), None):
        with pytest.raises(UnsupportedOptionError, match='attn_implementation="eager"'):
            Records(attentions=()).add_prefill(ModelOutput(attentions=attentions), [None, None])


def test_cross_attention_is_recorded_whole():
    """The second layer attends to 5 image positions: 5 keys in the prompt of 4 and in the block of 3 after it."""
    records = Records(attentions=())
    records.add_prefill(ModelOutput(attentions=(torch.rand(1, 1, 4, 4), torch.rand(1, 1, 4, 5))), [None, None])
    block = (torch.rand(1, 1, 3, 7), torch.rand(1, 1, 3, 5))
    records.add_block(ModelOutput(attentions=block), 2, [None, None])
    for position, (own, cross) in enumerate(records.attentions[1:]):
        assert torch.equal(own, block[0][:, :, position : position + 1, : 5 + position])
        assert torch.equal(cross, block[1][:, :, position : position + 1])
