"""Options of `generate`: block sizes, core's defaults, refusals by name."""

from pathlib import Path

import pytest
from tiny_drafts import tiny_config
from transformers import GenerationConfig

from hf_dflash import UnsupportedOptionError, UnsupportedTargetError
from hf_dflash.decoding.options import (
    OTHER_ASSISTANCE,
    describe,
    fields_set_in,
    refuse_options,
    refuse_other_assistance,
    refuse_reports,
    refuse_unloaded,
    resolve_block_size,
)

CONFIG = tiny_config(block_size=8)


@pytest.mark.parametrize(
    "block_size,num_assistant_tokens,expected",
    [(None, None, 8), (2, None, 2), (8, None, 8), (None, 1, 2), (None, 7, 8), (5, 4, 5)],
)
def test_block_size(block_size, num_assistant_tokens, expected):
    assert resolve_block_size(CONFIG, block_size, num_assistant_tokens) == expected


@pytest.mark.parametrize("block_size", [1, 9, 0, -3, True, "4", 4.0])
def test_an_invalid_block_size_is_named(block_size):
    with pytest.raises(UnsupportedOptionError, match="block_size must be an integer from 2 to 8, found"):
        resolve_block_size(CONFIG, block_size)


@pytest.mark.parametrize("tokens", [True, "3", 2.0])
def test_an_invalid_number_of_assistant_tokens_is_named(tokens):
    with pytest.raises(UnsupportedOptionError, match="num_assistant_tokens must be an integer from 1 to 7"):
        resolve_block_size(CONFIG, None, tokens)
    with pytest.raises(UnsupportedOptionError, match="block_size"):
        resolve_block_size(CONFIG, None, 8)


@pytest.mark.parametrize("tokens", [8, 0, 20])
def test_a_number_of_assistant_tokens_out_of_range_is_named_with_its_place(tokens):
    for options in ({}, {"tokens_name": "draft.generation_config.num_assistant_tokens"}):
        place = options.get("tokens_name", "num_assistant_tokens").replace(".", r"\.")
        message = rf"^{place}={tokens} makes blocks of {tokens + 1} tokens.*block_size must be an integer from 2 to 8"
        with pytest.raises(UnsupportedOptionError, match=message):
            resolve_block_size(CONFIG, None, tokens, **options)


def test_both_together_must_agree():
    with pytest.raises(UnsupportedOptionError, match="block_size=4 and num_assistant_tokens=4 .*disagree"):
        resolve_block_size(CONFIG, 4, 4)


@pytest.mark.parametrize("name", OTHER_ASSISTANCE)
def test_every_option_of_other_assistance_is_refused_by_name(name):
    with pytest.raises(UnsupportedOptionError, match=f"`{name}=3`"):
        refuse_other_assistance({}, {name: 3})
    refuse_other_assistance({name: None}, {name: False})


def test_default_values_of_core_count_as_unset():
    defaults = GenerationConfig(**GenerationConfig._get_default_generation_params())
    assert not any(fields_set_in(defaults).get(name) for name in (*OTHER_ASSISTANCE, "num_assistant_tokens"))
    assert fields_set_in(GenerationConfig(num_assistant_tokens=5))["num_assistant_tokens"] == 5
    assert fields_set_in(None) == {}


def test_a_cache_with_another_name_is_not_blamed_on_use_cache():
    """transformers 5.17 passes `cache_params` to pure Mamba targets."""
    with pytest.raises(UnsupportedOptionError, match="cache_params.*5.24"):
        refuse_options(GenerationConfig(use_cache=True), {"cache_params": object()}, 1, None)
    with pytest.raises(UnsupportedOptionError, match="`use_cache` \\(found False\\)"):
        refuse_options(GenerationConfig(use_cache=False), {}, 1, None)


def test_a_target_with_a_cache_of_its_own_kind_is_not_told_to_set_use_cache():
    with pytest.raises(UnsupportedTargetError, match="RwkvForCausalLM creates a cache of its own kind") as caught:
        refuse_options(GenerationConfig(use_cache=True), {}, 1, None, target_class="RwkvForCausalLM")
    assert "use_cache" not in str(caught.value)


def test_messages_name_the_class_of_an_object_whose_text_fills_pages():
    class Tokenizer:
        def __repr__(self):
            return "vocabulary " * 10_000

    with pytest.raises(UnsupportedOptionError, match="`assistant_tokenizer=a Tokenizer`") as caught:
        refuse_other_assistance({"assistant_tokenizer": Tokenizer()})
    assert len(str(caught.value)) < 500
    assert [describe(value) for value in (None, True, 0.3, "x", [1])] == ["None", "True", "0.3", "'x'", "a list"]


@pytest.mark.parametrize("name", ["folder/draft", Path("folder/draft")])
def test_the_name_of_a_draft_is_answered_with_how_to_load_it(name):
    with pytest.raises(UnsupportedOptionError, match=r"`assistant_model` .*hf_dflash\.load_draft\('folder/draft'\)"):
        refuse_unloaded("assistant_model", name)
    refuse_unloaded("assistant_model", None)


@pytest.mark.parametrize("value", [5, True, "print", ["a"]])
def test_stats_must_be_callable_and_trace_a_path(value, tmp_path):
    with pytest.raises(UnsupportedOptionError, match="`stats` must be a function"):
        refuse_reports(value, None)
    if not isinstance(value, str):
        # `open(5)` would write to whatever file has descriptor 5.
        with pytest.raises(UnsupportedOptionError, match="`trace` must be the path"):
            refuse_reports(None, value)
    refuse_reports(print, tmp_path / "rounds.jsonl")
    refuse_reports(None, "rounds.jsonl")
