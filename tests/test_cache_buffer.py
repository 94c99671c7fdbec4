"""The growing buffer, and the draft's context built on it, compared with plain concatenation."""

import pytest
import torch

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.cache import DraftContextCache
from hf_dflash.target.cache.buffer import FIRST_CAPACITY, GrowingBuffer


def entries(count: int, start: int) -> torch.Tensor:
    """Return `(1, 1, count, 1)` counting up from `start`."""
    return torch.arange(start, start + count, dtype=torch.float32).view(1, 1, -1, 1)


def as_list(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor.flatten()]


class TestGrowingBuffer:
    def test_entries_survive_growth_and_drops(self):
        buffer, expected, written = GrowingBuffer(ceiling=5000), [], 0
        for count, dropped in [(3, 1), (300, 0), (16, 15), (700, 16), (1, 0), (16, 4)]:
            buffer.append(entries(count, written))
            buffer.drop_last(dropped)
            expected = (expected + list(range(written, written + count)))[: len(expected) + count - dropped]
            written += count
            assert as_list(buffer.last(len(buffer))) == expected

    def test_keeps_the_requested_entries_and_stays_small(self):
        buffer = GrowingBuffer(ceiling=40)
        for start in range(0, 4000, 4):
            buffer.append(entries(4, start), keep=10)
            expected = list(range(max(0, start - 10), start + 4))
            assert as_list(buffer.last(14)) == expected
        assert buffer.num_bytes() <= 4 * max(FIRST_CAPACITY, 40)

    def test_a_high_ceiling_is_not_allocated_up_front(self):
        buffer = GrowingBuffer(ceiling=100_000)
        buffer.append(entries(10, 0))
        assert buffer.num_bytes() == 4 * FIRST_CAPACITY

    def test_capacity_stops_at_the_ceiling_and_exceeds_it_if_needed(self):
        buffer = GrowingBuffer(ceiling=600)
        buffer.append(entries(500, 0))
        assert buffer.num_bytes() == 4 * 600
        buffer.append(entries(200, 500))
        assert as_list(buffer.last(700)) == list(range(700))

    def test_appending_does_not_move_existing_entries(self):
        buffer = GrowingBuffer(ceiling=1000)
        buffer.append(entries(100, 0))
        address = buffer.last(100).data_ptr()
        for step in range(10):
            buffer.append(entries(8, step))
            buffer.drop_last(8)
        assert buffer.last(100).data_ptr() == address


class TestDraftContextCache:
    def run(self, windows, rounds):
        """Feed rounds of (new context, block), drop each block afterwards, and compare with concatenation."""
        cache = DraftContextCache(windows, max_length=400, block_size=8)
        context: list[int] = []
        for new, block in rounds:
            start = len(context)
            fed = entries(new + block, start)
            context += range(start, start + new)
            all_entries = [*context, *range(len(context), len(context) + block)]
            for layer, window in enumerate(windows):
                keys, values = cache.update(fed, fed + 0.5, layer)
                expected = all_entries if window is None else all_entries[-(window - 1 + new + block) :]
                assert as_list(keys) == expected
                assert torch.equal(values, keys + 0.5)
            assert cache.get_seq_length() == len(all_entries)
            cache.crop(-block)
            assert cache.get_seq_length() == len(context)
        return cache

    def test_full_and_sliding_layers_return_what_a_concatenation_would(self):
        self.run([None, 6, 1], [(9, 8), (1, 8), (5, 8), (8, 8), (3, 4)] + [(2, 8)] * 60)

    def test_a_prompt_longer_than_the_window(self):
        self.run([None, 6], [(150, 8), (4, 8), (1, 8)])

    def test_a_sliding_layer_stays_small(self):
        windowed = self.run([6], [(1, 8)] * 300)
        assert windowed.num_bytes() <= 2 * 4 * FIRST_CAPACITY

    def test_cropping_past_the_stored_entries_is_refused(self):
        cache = self.run([6], [(2, 8)] * 100)
        with pytest.raises(UnsupportedOptionError, match="cannot be dropped from layer 0"):
            cache.crop(-190)

    def test_cropping_more_than_was_read_is_refused_and_changes_nothing(self):
        cache = DraftContextCache([None], max_length=10, block_size=4)
        cache.update(entries(3, 0), entries(3, 0), 0)
        with pytest.raises(UnsupportedOptionError, match="has read 3"):
            cache.crop(-4)
        assert cache.get_seq_length() == 3
