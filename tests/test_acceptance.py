"""The acceptance rule against a reference loop, and its equivalence to rejection sampling."""

import pytest
import torch

from hf_dflash.decoding.acceptance import cut_at_first, greedy_choices, matching_prefix, nan_free_prefix


def test_matching_prefix_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(0, 3, (200, 5), generator=generator)
    choices = torch.randint(0, 3, (200, 6), generator=generator)
    expected = []
    for row, other in zip(candidates.tolist(), choices.tolist(), strict=True):
        count = 0
        while count < 5 and row[count] == other[count]:
            count += 1
        expected.append(count)
    assert matching_prefix(candidates, choices).tolist() == expected
    assert set(expected) >= {0, 1, 2, 3}


def test_a_correct_candidate_after_a_wrong_one_does_not_count():
    assert matching_prefix(torch.tensor([[7, 8, 9]]), torch.tensor([[7, 5, 9, 4]])).tolist() == [1]


def test_no_candidates():
    assert matching_prefix(torch.zeros(2, 0, dtype=torch.long), torch.tensor([[4], [5]])).tolist() == [0, 0]


@pytest.mark.parametrize(
    "stop,length,expected",
    [("FTFT", 3, 2), ("FFFT", 3, 3), ("FFFT", 4, 4), ("TFFF", 4, 1), ("FFFF", 2, 2), ("FFTF", 3, 3)],
)
def test_cut_at_first(stop, length, expected):
    stops = torch.tensor([[letter == "T" for letter in stop]])
    assert cut_at_first(stops, torch.tensor([length])).tolist() == [expected]


def test_rows_are_cut_independently():
    stops = torch.tensor([[False, True, False], [True, True, True], [False, False, False]])
    assert cut_at_first(stops, torch.tensor([3, 3, 3])).tolist() == [2, 1, 3]


@pytest.mark.parametrize("nan_rows, expected", [([], 3), ([0], 0), ([1], 1), ([2], 2), ([0, 2], 0), ([1, 2], 1)])
def test_rows_count_up_to_the_first_with_nan(nan_rows, expected):
    logits = torch.randn(2, 3, 7)
    logits[0, :, 3] = -torch.inf  # infinities (a suppressed token, an overflow) do not make a row NaN
    logits[0, 1, 5] = torch.inf
    logits[0, nan_rows, 4] = torch.nan
    assert nan_free_prefix(logits).tolist() == [expected, 3]


def test_greedy_choices_take_the_first_of_equal_logits():
    logits = torch.tensor([[[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]]])
    assert greedy_choices(logits).tolist() == [[1, 0]]


def test_drawing_while_it_agrees_is_rejection_sampling_with_a_point_mass():
    """The first two tokens of a block, proposed as [2, 0], follow the distribution p over 40,000 draws. The standard
    error of each of the 16 cell frequencies is below 0.0025; 0.0125 is five of them, exceeded by chance less than once
    in 100,000 runs.

    The control accepts with probability p(x), but on rejection draws from all of p instead of p without the rejected
    candidate.
    """
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = 40_000
    torch.manual_seed(0)
    drawn = torch.multinomial(p, 2 * draws, replacement=True).view(draws, 2)
    candidates = torch.tensor([[2, 0]]).expand(draws, 2)
    accepted = matching_prefix(candidates, drawn)
    # A row that stops after its first token draws its second in the next round, from the same distribution.
    later = torch.multinomial(p, draws, replacement=True)
    second = torch.where(accepted >= 1, drawn[:, 1], later)
    frequencies = torch.bincount(drawn[:, 0] * 4 + second, minlength=16) / draws
    assert (frequencies - torch.outer(p, p).flatten()).abs().max() < 0.0125

    kept = torch.rand(draws) < p[2]
    wrong_first = torch.where(kept, torch.tensor(2), torch.multinomial(p, draws, replacement=True))
    wrong = torch.bincount(wrong_first, minlength=4) / draws
    assert (wrong - p).abs().max() > 0.0125
