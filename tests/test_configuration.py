"""The canonical configuration: defaults, JSON round trip, and rejected values."""

import copy
import math

import pytest
from tiny_drafts import tiny_config
from transformers import AutoConfig

from hf_dflash.draft.configuration_dflash import MAXIMA, DFlashConfig, find_problems, format_value, is_number
from hf_dflash.draft.errors import CheckpointError, UnsupportedOptionError


def error_of(version: int = 1, **overrides) -> str:
    """Return the error message of a tiny configuration with some values overridden."""
    values = {**tiny_config(version).to_dict(), "layer_causal": None, **overrides}
    with pytest.raises(CheckpointError) as caught:
        DFlashConfig(**values)
    return str(caught.value)


def test_head_dim_layer_types_and_causality_are_derived():
    values = {key: value for key, value in tiny_config().to_dict().items() if not key.startswith("layer_")}
    config = DFlashConfig(**{**values, "head_dim": None, "num_attention_heads": 8})
    assert config.head_dim == 8  # 64 / 8
    assert config.layer_types == ["full_attention"] * 2
    assert config.layer_causal == [False, False]
    assert config.rope_parameters["rope_type"] == "default"


def test_sliding_layers_are_causal_by_default_and_full_ones_are_not():
    config = tiny_config(layer_types=["sliding_attention", "full_attention"])
    assert config.layer_causal == [True, False]


@pytest.mark.parametrize(("target_hidden_size", "width"), [(None, 3 * 64), (32, 3 * 32)])
def test_context_is_as_wide_as_all_taps(target_hidden_size, width):
    assert tiny_config(taps=(0, 2, 4), target_hidden_size=target_hidden_size).context_size == width


@pytest.mark.parametrize("version", [1, 2])
def test_json_round_trip(tmp_path, version):
    config = tiny_config(
        version, layer_types=["sliding_attention", "full_attention"], target_name_or_path="some/target"
    )
    config.save_pretrained(tmp_path)
    again = DFlashConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_auto_config_loads_the_canonical_form(tmp_path):
    import hf_dflash  # noqa: F401 - registers the configuration

    tiny_config().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DFlashConfig)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"])
def test_a_missing_size_is_named(key):
    assert f"`{key}` is missing" in error_of(**{key: None})


@pytest.mark.parametrize("layers", [0, -1, 2.0, "2", True])
def test_number_of_layers_must_be_a_positive_integer(layers):
    message = error_of(num_hidden_layers=layers)
    assert "`num_hidden_layers` must be an integer of at least 1" in message
    assert repr(layers) in message


def test_query_heads_are_a_multiple_of_key_value_heads():
    message = error_of(num_attention_heads=4, num_key_value_heads=3)
    assert "`num_attention_heads` (4) must be a multiple of `num_key_value_heads` (3)" in message


def test_head_dim_must_be_given_or_follow_from_the_sizes():
    assert "`hidden_size` (64) is not a multiple of `num_attention_heads` (6)" in error_of(
        head_dim=None, num_attention_heads=6
    )
    assert "`head_dim` must be even" in error_of(head_dim=15)


def test_an_unknown_activation_is_rejected():
    assert "`hidden_act`" in error_of(hidden_act="sillu") and "'sillu'" in error_of(hidden_act="sillu")


@pytest.mark.parametrize("block_size", [1, 0, True, "16", 16.0])
def test_block_size_must_be_an_integer_of_at_least_2(block_size):
    message = error_of(block_size=block_size)
    assert "`block_size` must be an integer of at least 2" in message
    assert f"found {block_size!r} ({type(block_size).__name__})" in message


def test_a_missing_block_size_is_named():
    assert "`block_size` is missing" in error_of(block_size=None)


@pytest.mark.parametrize("wanted", [1, 9, 0, True, "4", 4.0])
def test_the_block_size_of_a_call_is_between_2_and_the_checkpoints(wanted):
    with pytest.raises(UnsupportedOptionError) as caught:
        tiny_config(block_size=8).checked_block_size(wanted)
    message = str(caught.value)
    assert f"from 2 to 8, found {wanted!r}" in message
    assert "`block_size` (top level) or `dflash_config.block_size`" in message


@pytest.mark.parametrize(("wanted", "size"), [(None, 8), (2, 2), (8, 8)])
def test_a_valid_block_size_is_used(wanted, size):
    assert tiny_config(block_size=8).checked_block_size(wanted) == size


@pytest.mark.parametrize("mask_token_id", [-1, True, "7", 7.0])
def test_mask_token_must_be_a_token_id(mask_token_id):
    message = error_of(mask_token_id=mask_token_id)
    assert "`mask_token_id` must be a token id" in message and repr(mask_token_id) in message


def test_mask_token_must_be_given_and_in_the_vocabulary():
    assert "`mask_token_id` is missing" in error_of(mask_token_id=None)
    assert "below `vocab_size` (128); found 128" in error_of(mask_token_id=128, vocab_size=128)


@pytest.mark.parametrize("taps", [None, [], [1, 2.0], [True, 2], "1,2", [[1], [2]], [None]])
def test_taps_are_a_list_of_integers_and_never_guessed(taps):
    message = error_of(target_layer_ids=taps)
    assert "`target_layer_ids`" in message
    assert "never guessed: get them from the draft's author" in message


def test_invalid_taps():
    assert "none of them negative; found [-1, 2]" in error_of(target_layer_ids=[-1, 2])
    assert "distinct (2 occurs more than once)" in error_of(target_layer_ids=[2, 3, 2])
    message = error_of(target_layer_ids=[1, 6], target_num_hidden_layers=6)
    assert "layers of a target with 6 layers, 0 to 5; found [1, 6]" in message


def test_layer_types_fit_the_layers():
    message = error_of(layer_types=["full_attention"] * 3, num_hidden_layers=2)
    assert "`layer_types` must be of length 2 (`num_hidden_layers`), not 3" in message
    message = error_of(layer_types=["full_attention", "linear_attention"])
    assert "full_attention, sliding_attention" in message and "unknown: linear_attention" in message


def test_sliding_layers_need_a_window():
    message = error_of(layer_types=["sliding_attention"] * 2, sliding_window=None)
    assert "`sliding_window` is missing" in message
    assert "`sliding_window` must be an integer" in error_of(layer_types=["sliding_attention"] * 2, sliding_window=0)


def test_causality_has_an_entry_for_each_layer():
    assert "`layer_causal` must be of length 2" in error_of(layer_causal=[True])
    assert "a list of booleans" in error_of(layer_causal=[1, 0])


def test_rope_theta_has_no_default():
    for rope in ({}, {"rope_type": "default"}, {"rope_theta": None}):
        assert "`rope_theta` is missing" in error_of(rope_parameters=rope)
    assert "a number above 0" in error_of(rope_parameters={"rope_theta": -1.0})
    assert "`rope_parameters` must be a mapping" in error_of(rope_parameters=[10000.0])


def test_an_unknown_rope_type_is_reported_with_the_known_ones():
    message = error_of(rope_parameters={"rope_theta": 1e4, "rope_type": "yarrn"})
    assert "`rope_type` must be one of" in message and "yarn" in message and "'yarrn'" in message


def test_yarn_needs_its_factor_and_its_original_length():
    message = error_of(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"})
    assert "`factor` is missing" in message and "`original_max_position_embeddings` is missing" in message


def test_rope_values_are_numbers():
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 64}
    assert "`factor` must be a number above 0 for RoPE of type yarn; found '4' (str)" in error_of(rope_parameters=yarn)
    assert "`beta_fast` must be a number" in error_of(rope_parameters={**yarn, "factor": 4, "beta_fast": True})
    longrope = {"rope_theta": 1e4, "rope_type": "longrope", "original_max_position_embeddings": 64}
    message = error_of(rope_parameters={**longrope, "short_factor": [1.0, "2"]})
    assert "`short_factor` must be a list of numbers" in message and "`long_factor` is missing" in message


def test_invalid_numbers_are_rejected():
    assert "`attention_bias` must be true or false" in error_of(attention_bias="yes")
    assert "`attention_dropout` must be a number from 0 to below 1" in error_of(attention_dropout=1.5)
    assert "`output_multiplier` must be a number above 0" in error_of(output_multiplier=0)
    assert "`input_embedding_scale`" in error_of(input_embedding_scale=float("nan"))
    assert "or null for no cap" in error_of(final_logit_softcapping=-30.0)


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_dflash_2_needs_its_fields_and_dflash_1_has_none(key):
    assert f"`{key}` is missing" in error_of(2, **{key: None})
    assert f"`{key}` must be null in a DFlash 1 draft" in error_of(1, **{key: 2})


def test_dflash_2_fields_must_fit_the_sizes():
    assert "`conv_group_size` must be a divisor of `hidden_size` (64); found 24" in error_of(2, conv_group_size=24)
    assert "`selector_top_k` must be at most `vocab_size` (128)" in error_of(2, selector_top_k=129)
    assert "`vocab_size` is missing" in error_of(2, vocab_size=None, mask_token_id=7)
    assert "null or 128 in a DFlash 2 draft" in error_of(2, draft_vocab_size=64)
    assert "`dflash_version` must be 1 or 2" in error_of(dflash_version=3)


def test_a_vocabulary_of_its_own_is_no_larger_than_the_targets():
    assert "`draft_vocab_size` must be at most `vocab_size` (128)" in error_of(draft_vocab_size=129)


@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling", "dflash_config"])
def test_keys_of_published_layouts_are_not_ignored(key):
    assert f"`{key}`" in error_of(**{key: {"x": 1} if key != "rope_theta" else 1e6})


def test_all_problems_are_listed_at_once():
    message = error_of(block_size=1, mask_token_id=None, target_layer_ids=[])
    assert "3 problems:" in message
    assert all(f"- `{key}`" in message for key in ("block_size", "mask_token_id", "target_layer_ids"))


def test_a_problem_says_where_the_value_was_read_from():
    values = {**tiny_config().to_dict(), "block_size": "8"}
    (problem,) = find_problems(values, {"block_size": "`dflash_config.block_size`"})
    assert problem.endswith("found '8' (str) in `dflash_config.block_size`.")


# Values that no integer or number of a configuration may have: wrong types, and far out of range.
ABSURD = {
    "text": "8",
    "boolean": True,
    "list": [8],
    "mapping": {"a": 8},
    "negative": -1,
    "2**63": 2**63,
    "400 digits": 10**400,
    "5000 digits": 10**5000,
    "nan": math.nan,
    "inf": math.inf,
}
FRACTIONS = (
    "rms_norm_eps",
    "initializer_range",
    "attention_dropout",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)


@pytest.mark.parametrize("value", [*ABSURD.values(), 8.0], ids=[*ABSURD, "fraction"])
@pytest.mark.parametrize("key", MAXIMA)
def test_every_integer_has_a_type_and_a_range(key, value):
    version = 2 if key.startswith(("conv_", "selector_")) else 1
    message = error_of(version, **{key: value})
    assert f"`{key}` must be" in message and "found" in message
    assert len(message) < 3000


@pytest.mark.parametrize("key", MAXIMA)
def test_the_range_ends_at_its_maximum(key):
    values = tiny_config(2).to_dict()
    over, at = ({**values, key: MAXIMA[key] + more} for more in (1, 0))
    assert any(f"`{key}` must be a" in text and f"{MAXIMA[key]}; found" in text for text in find_problems(over))
    assert not any(f"`{key}` must be a" in text and f"{MAXIMA[key]}; found" in text for text in find_problems(at))


def test_every_integer_of_the_configuration_is_in_the_table():
    integers = {
        name
        for name, kind in DFlashConfig.__annotations__.items()
        if str(kind).replace(" ", "") in ("int", "int|None", "<class'int'>")
    }
    assert integers - {"dflash_version"} == set(MAXIMA)


@pytest.mark.parametrize("value", [*ABSURD.values(), 1e300], ids=[*ABSURD, "1e300"])
@pytest.mark.parametrize("key", FRACTIONS)
def test_every_fraction_has_a_type_and_a_range(key, value):
    message = error_of(**{key: value})
    assert f"`{key}` must be a number" in message and len(message) < 3000


@pytest.mark.parametrize("value", [*ABSURD.values(), 0, 1e300], ids=[*ABSURD, "zero", "1e300"])
@pytest.mark.parametrize("key", ["rope_theta", "factor", "original_max_position_embeddings", "beta_fast"])
def test_every_number_of_rope_has_a_type_and_a_range(key, value):
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    message = error_of(rope_parameters={**yarn, key: value})
    assert f"`{key}` must be a number" in message and len(message) < 3000


def test_other_fields_have_a_type():
    for value in (1, "yes", "false", []):
        for key in ("attention_bias", "own_embeddings"):
            assert f"`{key}` must be true or false" in error_of(**{key: value})
    for value in (1, True, ["a"], {}):
        for key in ("target_name_or_path", "source_layout"):
            assert f"`{key}` must be a string" in error_of(**{key: value})
    for version in (1.0, True, "1", [1]):
        assert "`dflash_version` must be 1 or 2" in error_of(dflash_version=version)
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert "`truncate` must be true or false" in error_of(rope_parameters={**yarn, "truncate": "false"})
    assert not find_problems({**tiny_config().to_dict(), "rope_parameters": {**yarn, "truncate": False}})


@pytest.mark.parametrize("taps", [[4096], [0] * 10**6, list(range(10**6)), [-(10**5000), 1]], ids=len)
def test_absurd_taps_are_reported_at_once(taps):
    message = error_of(target_layer_ids=taps)
    assert "`target_layer_ids` must be" in message and len(message) < 3000


def test_a_block_size_of_a_call_can_be_absurd():
    with pytest.raises(UnsupportedOptionError, match="from 2 to 8, found a value of type int"):
        tiny_config().checked_block_size(10**5000)


def test_numbers_are_those_that_a_float_can_hold():
    assert is_number(0) and is_number(-1.5) and is_number(10**300)
    assert not any(map(is_number, (10**400, math.nan, math.inf, -math.inf, True, "1", None)))


def test_any_value_can_be_formatted():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    assert format_value({"a": [1, "b"]}) == "{'a': [1, 'b']}"
    assert format_value(10**5000) == "a value of type int that is too large to print"
    assert format_value(deep) == "a value of type list that is too large to print"
    assert format_value("x" * 1000).endswith("... (1002 characters)") and len(format_value("x" * 1000)) < 400
