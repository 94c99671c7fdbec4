"""The metrics of a call, checked against hand-computed values."""

import json
import math

import pytest
import torch

from hf_dflash import DFlashStatistics
from hf_dflash.decoding.statistics import LOW_ACCEPTANCE_ROUNDS, RoundTrace


def test_every_metric_of_four_rounds():
    statistics = DFlashStatistics(prefills=1)
    for proposed, accepted, committed, num_bytes in ((3, 3, 4, 10), (3, 0, 1, 30), (3, 2, 3, 20), (1, 1, 1, 20)):
        statistics.add_round(proposed, accepted, committed, num_bytes)
    assert statistics.rounds == 4 and statistics.new_tokens == 10
    assert statistics.tau == 9 / 4
    assert statistics.acceptance_rate == 6 / 10
    # Position 2 was proposed in the first three rounds and reached in two of them.
    assert statistics.acceptance_by_position == [3 / 4, 2 / 3, 1 / 3]
    assert statistics.histogram == [1, 1, 1, 1]
    assert statistics.peak_draft_bytes == 30


def test_before_the_first_round():
    statistics = DFlashStatistics()
    assert math.isnan(statistics.tau) and math.isnan(statistics.acceptance_rate)
    assert statistics.acceptance_by_position == [] and statistics.histogram == [0]
    assert statistics.as_dict()["rounds"] == 0


def test_phases_and_the_rest_add_up(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 6.0, 7.5, 10.0])
    monkeypatch.setattr("hf_dflash.decoding.statistics.time.perf_counter", lambda: next(clock))
    statistics = DFlashStatistics()
    with statistics.whole():
        with statistics.phase("propose"):
            pass
        with statistics.phase("verify"):
            pass
    assert statistics.seconds["propose"] == 3.0 and statistics.seconds["verify"] == 1.5
    assert statistics.total_seconds == 10.0 and statistics.rest_seconds == 5.5


def test_an_exception_still_ends_its_phase():
    statistics = DFlashStatistics()
    with pytest.raises(RuntimeError), statistics.phase("accept"):
        raise RuntimeError
    assert statistics.seconds["accept"] > 0


def test_the_trace_is_appended_to_and_closed_on_error(tmp_path):
    path = tmp_path / "rounds.jsonl"
    for row in range(2):
        with RoundTrace(path) as trace:
            trace.add(row, 0, torch.tensor([5, 6, 7]), 1, torch.tensor([6, 9]))
    with pytest.raises(RuntimeError), RoundTrace(path) as trace:
        raise RuntimeError
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1]
    assert lines[0] | {"row": 0} == {
        "row": 0,
        "round": 0,
        "anchor": 5,
        "candidates": [6, 7],
        "accepted": 1,
        "committed": [6, 9],
    }
    with RoundTrace(None) as silent:
        silent.add(0, 0, torch.tensor([5]), 0, torch.tensor([6]))


def test_the_low_acceptance_warning_follows_transformers_verbosity(caplog):
    from transformers.utils import logging

    def warned(verbosity: int) -> bool:
        caplog.clear()
        before = logging.get_verbosity()
        logging.set_verbosity(verbosity)
        try:
            statistics = DFlashStatistics()
            for _ in range(LOW_ACCEPTANCE_ROUNDS):
                statistics.add_round(7, 0, 1, 0)
        finally:
            logging.set_verbosity(before)
        return "Almost none of the draft's candidates" in caplog.text

    assert warned(logging.WARNING)
    assert not warned(logging.ERROR)
