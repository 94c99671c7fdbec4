"""Splitting the arguments of a batch into rows."""

import pytest
import torch
from transformers import DynamicCache

from hf_dflash import UnsupportedOptionError
from hf_dflash.decoding.rows import padding_before, prompt_length, row_kwargs
from hf_dflash.target.cache import CACHE_KEYWORD


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
