"""Published layouts: recognized, read into the canonical form, or rejected by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import CheckpointError
from hf_dflash.draft.layouts import LAYOUTS, read, recognize, to_canonical, unsupported_family

CONFIGS = Path(__file__).parent / "data" / "configs"
S, F = "sliding_attention", "full_attention"
HEADS = (32, 8, 128)


def fixture(name: str, **changes: Any) -> dict[str, Any]:
    """A published `config.json`; a change to None removes the key, one to `nested__key` goes into `dflash_config`."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    for key, value in changes.items():
        place, key = (raw["dflash_config"], key.removeprefix("nested__")) if key.startswith("nested__") else (raw, key)
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    return raw


def error_of(raw: dict[str, Any], shapes: dict | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        to_canonical(raw, shapes)
    return str(caught.value)


# name: layout, block, mask, taps, layers, hidden, heads q/kv/dim, theta, window, causal, target depth
PUBLISHED = {
    "qwen3-8b-dflash-b16": ("z-lab", 16, 151669, [1, 9, 17, 25, 33], [F] * 5, 4096, HEADS, 1e6, None, False, 36),
    "qwen3-4b-dflash-b16": ("z-lab", 16, 151669, [1, 9, 17, 25, 33], [F] * 5, 2560, HEADS, 1e6, None, False, 36),
    "qwen3.5-4b-dflash-old": ("z-lab", 16, 248070, [1, 8, 15, 22, 29], [F] * 5, 2560, HEADS, 1e7, None, False, 32),
    "qwen3.5-4b-dflash": (
        "z-lab-nested", 16, 248070, [1, 8, 15, 22, 29], [F] * 5, 2560, HEADS, 1e7, None, False, 32,
    ),
    "qwen3.5-35b-a3b-dflash-old": (
        "z-lab", 16, 248070, [1, 10, 19, 28, 37], [F] * 8, 2048, (32, 4, 128), 1e7, None, False, 40,
    ),
    "qwen3.5-35b-a3b-dflash": (
        "z-lab-nested", 16, 248077, [1, 6, 11, 16, 22, 27, 32, 37], [S] * 5 + [F], 2048, HEADS, 1e7, 4096, True, 40,
    ),
    "qwen3.5-122b-a10b-dflash": (
        "z-lab-nested", 16, 248077, [1, 7, 14, 20, 26, 32, 39, 45], [S] * 5 + [F], 3072, HEADS, 1e7, 4096, True, 48,
    ),
    "qwen3.6-27b-dflash": (
        "z-lab-nested", 16, 248070, [1, 16, 31, 46, 61], [S] * 4 + [F], 5120, HEADS, 1e7, 2048, True, 64,
    ),
    "qwen3.8-27b-dflash2": (
        "dflash2", 8, 248070, [5, 19, 33, 47, 61], [S] * 5, 5120, HEADS, 1e7, 2048, False, 64,
    ),
    "muse-glimmer-30b-assistant": (
        "muse", 16, 201818, [1, 13, 25, 37, 49], [S] * 5, 6656, HEADS, 5e5, 2048, False, None,
    ),
    "kimi-k2.5-dflash": (
        "z-lab", 8, 163838, [1, 12, 24, 35, 47, 58], [F] * 6, 7168, (64, 8, 128), 5e4, None, False, 61,
    ),
    "gpt-oss-20b-dflash": ("z-lab", 8, 200000, [1, 6, 11, 16, 21], [F] * 8, 2880, (64, 8, 64), 1.5e5, None, False, 24),
    "minimax-m2.5-dflash": (
        "z-lab-nested", 16, 200061, [1, 15, 30, 44, 59], [F] * 5, 3072, HEADS, 5e6, None, False, 62,
    ),
    "modelopt-qwen3-8b-dflash": (
        "modelopt", 8, 151669, [1, 9, 17, 25, 33], [S] * 5, 4096, HEADS, 1e6, 2048, False, 36,
    ),
    "speculators-qwen3-8b-dflash": (
        "speculators", 8, 151669, [1, 9, 17, 25, 33], [F] * 5, 4096, HEADS, 1e6, None, False, None,
    ),
    "speculators-qwen3-8b-dflash2": (
        "speculators", 8, 151669, [1, 9, 17, 25, 33], [S] * 5, 4096, HEADS, 1e6, 2048, False, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration(name):
    layout, block, mask, taps, types, hidden, heads, theta, window, causal, depth = PUBLISHED[name]
    raw = fixture(name)
    before = copy.deepcopy(raw)
    config = to_canonical(raw)
    assert raw == before
    assert recognize(raw).name == config.source_layout == layout
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (block, mask, taps)
    assert (config.layer_types, config.num_hidden_layers, config.hidden_size) == (types, len(types), hidden)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == heads
    assert config.rope_parameters["rope_theta"] == theta
    assert config.sliding_window == window
    assert config.layer_causal == [causal and kind == S for kind in types]
    assert config.target_num_hidden_layers == depth
    assert config.target_vocab_size == config.vocab_size
    assert config.dflash_version == (2 if "dflash2" in name else 1)
    assert DFlashConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_every_fixture_is_tested():
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*PUBLISHED, "laguna-xs-2.1-dflash"}
    assert {layout.name for layout in LAYOUTS} == {entry[0] for entry in PUBLISHED.values()} | {"canonical"}


def test_dflash_2_values():
    for name in ("qwen3.8-27b-dflash2", "speculators-qwen3-8b-dflash2"):
        config = to_canonical(fixture(name))
        assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
        assert (config.selector_rank, config.selector_top_k) == (256, 16)
        assert config.draft_vocab_size is None


def test_yarn_values_reach_the_canonical_form():
    kimi = to_canonical(fixture("kimi-k2.5-dflash")).rope_parameters
    assert kimi == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    oss = to_canonical(fixture("gpt-oss-20b-dflash")).rope_parameters
    assert (oss["rope_type"], oss["factor"], oss["truncate"], oss["rope_theta"]) == ("yarn", 32.0, False, 150000)


def test_speculators_names_its_target_and_its_vocabulary():
    config = to_canonical(fixture("speculators-qwen3-8b-dflash"))
    assert config.target_name_or_path == "Qwen/Qwen3-8B"
    assert (config.draft_vocab_size, config.vocab_size) == (32000, 151936)


# --- where a key may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "nested", "top"), [("block_size", 8, 16), ("mask_token_id", 5, 6)])
def test_a_nested_key_wins_over_a_top_level_one_and_null_counts_as_absent(key, nested, top):
    both = fixture("qwen3-8b-dflash-b16", **{f"nested__{key}": nested, key: top})
    assert getattr(to_canonical(both), key) == nested
    both["dflash_config"][key] = None
    assert getattr(to_canonical(both), key) == top


def test_each_key_is_looked_up_separately():
    raw = fixture("qwen3-8b-dflash-b16", nested__block_size=4, nested__mask_token_id=None, mask_token_id=9)
    config = to_canonical(raw)
    assert (config.block_size, config.mask_token_id) == (4, 9)


@pytest.mark.parametrize(
    ("is_causal", "causal", "expected"),
    [
        (None, None, [True] * 4 + [False]),
        (None, False, [False] * 5),
        (True, False, [True] * 5),
        (False, True, [False] * 5),
    ],
)
def test_causality_comes_from_is_causal_then_causal_then_the_layer_type(is_causal, causal, expected):
    raw = fixture("qwen3.6-27b-dflash", is_causal=is_causal, nested__causal=causal)
    assert to_canonical(raw).layer_causal == expected


def test_without_a_list_layers_slide_from_max_window_layers_on():
    raw = fixture("qwen3.6-27b-dflash", layer_types=None, max_window_layers=3)
    assert to_canonical(raw).layer_types == [F, F, F, S, S]
    raw = fixture("qwen3.6-27b-dflash", layer_types=None, use_sliding_window=False)
    assert to_canonical(raw).layer_types == [F] * 5


def test_an_unused_window_is_dropped():
    assert to_canonical(fixture("qwen3-8b-dflash-b16", sliding_window=4096)).sliding_window is None


def test_model_optimizers_own_window_wins():
    raw = fixture("modelopt-qwen3-8b-dflash", sliding_window=4096)
    assert to_canonical(raw).sliding_window == 2048
    raw["dflash_config"]["causal"] = True
    assert to_canonical(raw).layer_causal == [True] * 5


@pytest.mark.parametrize(("free", "expected"), [(None, True), (False, True), (True, False)])
def test_speculators_sliding_layers_are_causal_unless_the_key_frees_them(free, expected):
    raw = fixture("speculators-qwen3-8b-dflash", sliding_window_non_causal=free)
    raw["transformer_layer_config"] |= {"layer_types": [S] * 4 + [F], "sliding_window": 2048}
    assert to_canonical(raw).layer_causal == [expected] * 4 + [False]


def test_speculators_dflash_2_is_bidirectional_by_default():
    raw = fixture("speculators-qwen3-8b-dflash2", sliding_window_non_causal=None)
    assert to_canonical(raw).layer_causal == [False] * 5


def test_a_soft_cap_of_0_is_none():
    assert (
        to_canonical(fixture("qwen3-8b-dflash-b16", nested__final_logit_softcapping=0)).final_logit_softcapping is None
    )
    raw = fixture("qwen3-8b-dflash-b16", nested__final_logit_softcapping=30.0, nested__output_multiplier=0.5)
    config = to_canonical({**raw, "input_embedding_scale": 2.0})
    assert config.final_logit_softcapping == 30.0
    assert (config.output_multiplier, config.input_embedding_scale) == (0.5, 2.0)


# --- RoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 1.0}, "rope_scaling": {"rope_theta": 2.0}, "rope_theta": 3.0}, 1.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_theta": 2.0}, "rope_theta": 3.0}, 2.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": None, "rope_theta": 3.0}, 3.0),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 3.0}, 3.0),
    ],
)
def test_theta_comes_from_parameters_then_scaling_then_top_level(rope, theta):
    raw = {**fixture("qwen3-8b-dflash-b16", rope_theta=None, rope_scaling=None), **rope}
    assert to_canonical(raw).rope_parameters == {"rope_type": "default", "rope_theta": theta}


def test_theta_at_top_level_while_rope_parameters_holds_the_rest():
    raw = fixture("kimi-k2.5-dflash", rope_scaling=None)
    raw["rope_parameters"] = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    assert to_canonical(raw).rope_parameters == {**raw["rope_parameters"], "rope_theta": 50000.0}


def test_no_yarn_if_the_configuration_says_null():
    assert to_canonical(fixture("qwen3-8b-dflash-b16")).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 1000000,
    }


def test_m_rope_keys_are_dropped():
    raw = fixture("qwen3.5-4b-dflash")
    raw["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    assert to_canonical(raw).rope_parameters == {"rope_type": "default", "rope_theta": 10000000}
    raw["rope_parameters"]["rope_type"] = "mrope"
    assert to_canonical(raw).rope_parameters["rope_type"] == "default"


def test_a_missing_theta_names_every_place():
    message = error_of(fixture("qwen3-8b-dflash-b16", rope_theta=None))
    assert "`rope_theta` is missing" in message
    assert "`rope_parameters.rope_theta` and `rope_scaling.rope_theta` and `rope_theta` (top level)" in message


def test_one_rope_for_all_layers():
    default, other = {"rope_theta": 1e6, "rope_type": "default"}, {"rope_theta": 1e4, "rope_type": "default"}
    raw = fixture("qwen3.6-27b-dflash", rope_parameters={F: default, S: default})
    assert to_canonical(raw).rope_parameters == default
    raw["rope_parameters"][S] = other
    assert "`rope_parameters` gives full_attention and sliding_attention layers different values" in error_of(raw)
    raw["layer_types"] = [S] * 5
    assert to_canonical(raw).rope_parameters == other


def test_unknown_rope_options_are_rejected():
    message = error_of(fixture("kimi-k2.5-dflash", rope_scaling={"type": "yarn", "factor": 2.0, "twist": 3}))
    assert "`rope_scaling.twist` (3) is an unknown RoPE option" in message
    assert "`original_max_position_embeddings` is missing" in message


def test_partial_rotation_is_rejected_if_the_draft_may_have_been_trained_with_it():
    raw = fixture("speculators-qwen3-8b-dflash")
    raw["transformer_layer_config"]["rope_parameters"]["partial_rotary_factor"] = 0.25
    message = error_of(raw)
    assert "`transformer_layer_config.rope_parameters.partial_rotary_factor` is 0.25" in message


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_missing_key_names_both_places(key):
    raw = fixture("qwen3-8b-dflash-b16", **{key: None, f"nested__{key}": None})
    message = error_of(raw)
    assert f"`{key}` is missing (looked in `dflash_config.{key}` and `{key}` (top level)" in message


def test_a_wrong_value_names_its_place():
    assert "found '16' (str) in `block_size` (top level)" in error_of(fixture("qwen3-8b-dflash-b16", block_size="16"))
    assert "in `dflash_config.block_size`" in error_of(fixture("qwen3.5-4b-dflash", nested__block_size=1))
    assert "in `dflash_config.target_layer_ids`" in error_of(
        fixture("qwen3.5-4b-dflash", nested__target_layer_ids=[1, 1])
    )


def test_speculators_taps_are_named_by_their_own_key():
    message = error_of(fixture("speculators-qwen3-8b-dflash", aux_hidden_state_layer_ids=None))
    assert "`target_layer_ids` is missing (looked in `aux_hidden_state_layer_ids` (top level)" in message
    # Id 0 is the embedding, not a decoder layer's output.
    message = error_of(fixture("speculators-qwen3-8b-dflash", aux_hidden_state_layer_ids=[0, 10]))
    assert "found [-1, 9] in `aux_hidden_state_layer_ids` (top level), each minus 1" in message


def test_a_window_is_looked_for_under_both_names():
    message = error_of(fixture("qwen3.6-27b-dflash", sliding_window=None))
    assert "`sliding_window` is missing" in message
    assert "`dflash_config.swa_window_size`" in message and "`sliding_window` (top level)" in message


def test_taps_must_match_the_inputs_of_fc():
    message = error_of(fixture("qwen3-8b-dflash-b16"), {"fc.weight": (4096, 4 * 4096)})
    assert "5 taps of width 4096 make 20480 inputs, but `fc.in_features` is 16384 (4 taps)" in message
    message = error_of(fixture("qwen3-8b-dflash-b16"), {"fc.weight": (4096, 20000)})
    assert "not a whole number of taps" in message


def test_taps_beyond_the_targets_depth():
    message = error_of(fixture("qwen3-8b-dflash-b16", nested__target_layer_ids=[1, 36]))
    assert "layers of a target with 36 layers, 0 to 35" in message


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_a_missing_dflash_2_key_is_named(key):
    assert f"`{key}` is missing (looked in `dflash_config.{key}`" in error_of(
        fixture("qwen3.8-27b-dflash2", **{f"nested__{key}": None})
    )


def test_selector_keys_without_the_dflash_2_architecture_are_not_ignored():
    message = error_of(fixture("qwen3.8-27b-dflash2", architectures=["DFlashDraftModel"]))
    assert "`selector_rank` must be null in a DFlash 1 draft" in message


@pytest.mark.parametrize(
    ("key", "value", "meaning"),
    [
        ("attention_sink_bias", True, "attention sinks"),
        ("add_swa_attention_sink_bias", True, "attention sinks"),
        ("is_neox_style", False, "interleaved RoPE"),
        ("rope_interleave", True, "interleaved RoPE"),
        ("use_aux_hidden_state", False, "does not read the target's layers"),
        ("sample_from_anchor", True, "anchor's own position"),
        ("shift_label", True, "shifted by one"),
        ("norm_before_fc", True, "norm before `fc`"),
        ("logit_scale", 0.5, "logit scale"),
        ("quantization_config", {"quant_method": "gptq"}, "quantized draft weights"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-8b-dflash-b16", "speculators-qwen3-8b-dflash"])
def test_unsupported_options_are_rejected_by_name(name, key, value, meaning):
    message = error_of({**fixture(name), key: value})
    assert f"`{key}` (top level) is {value!r}" in message and meaning in message


@pytest.mark.parametrize("value", [None, False])
def test_an_option_at_a_harmless_value_is_accepted(value):
    assert to_canonical(fixture("qwen3-8b-dflash-b16") | {"sample_from_anchor": value, "is_neox_style": True})


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("Domino", fixture("speculators-qwen3-8b-dflash", projector_type="domino")),
        ("Domino", fixture("qwen3-8b-dflash-b16", nested__projector_type="domino")),
        ("DSpark", fixture("speculators-qwen3-8b-dflash", speculators_model_type="dspark")),
        ("DSpark", fixture("qwen3-8b-dflash-b16", architectures=["Qwen3DSparkModel"])),
        ("DSpark", fixture("qwen3-8b-dflash-b16", nested__markov_rank=256)),
        ("LiLiCorr", fixture("qwen3-8b-dflash-b16", architectures=["LiLiCorrDraftModel"])),
        ("Laguna", fixture("laguna-xs-2.1-dflash")),
        ("MiMo", fixture("qwen3-8b-dflash-b16", model_type="mimo_v2")),
    ],
)
def test_relatives_are_rejected_by_name(family, raw):
    assert unsupported_family(raw) == family
    assert recognize(raw) is None
    message = error_of(raw)
    assert message.startswith(f"This is a {family} draft") and "not supported yet" in message


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64},
        {"model_type": "laguna", "architectures": ["LagunaForCausalLM"]},
        {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
        {"model_type": "dflash"},
        {},
    ],
)
def test_an_ordinary_model_is_not_a_draft(raw):
    assert recognize(raw) is None
    message = error_of(raw)
    assert "This is not a DFlash draft" in message and "`dflash_config`" in message


@pytest.mark.parametrize(("key", "special"), [("eos_token_id", 151669), ("pad_token_id", [1, 151669])])
def test_a_mask_token_that_is_a_special_token_is_a_warning(key, special):
    _, reading = read(fixture("qwen3-8b-dflash-b16", **{key: special}))
    assert reading.all_problems() == []
    (warning,) = reading.warnings
    assert f"`mask_token_id` (151669) is also `{key}`" in warning
    assert read(fixture("qwen3-8b-dflash-b16"))[1].warnings == []


# --- tensors ---------------------------------------------------------------------------------------------------------


def layout_named(name: str):
    return next(layout for layout in LAYOUTS if layout.name == name)


def test_tensor_names():
    muse, speculators, z_lab = layout_named("muse"), layout_named("speculators"), layout_named("z-lab")
    assert muse.rename("encoder.fc.weight") == "fc.weight"
    assert muse.rename("encoder.output_norm_enc.weight") == "hidden_norm.weight"
    assert muse.rename("layers.0.self_attn.q_proj.weight") == "layers.0.self_attn.q_proj.weight"
    assert [speculators.rename(name) for name in ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")] == [
        None
    ] * 3
    assert [speculators.rename(name) for name in ("d2t", "lm_head.weight")] == ["d2t", "lm_head.weight"]
    # Only speculators' files have such tensors; in other layouts they are unexpected and must be reported.
    assert z_lab.rename("t2d") == "t2d"
    selector = "candidate_selector.predecessor_codebook"
    assert z_lab.rename(selector) == z_lab.rename(f"{selector}.weight") == selector
    assert z_lab.rename("rotary_emb.inv_freq") is None


def test_own_embeddings_and_heads_are_detected_from_the_tensors():
    raw = fixture("qwen3-8b-dflash-b16")
    config = to_canonical(raw, {"embed_tokens.weight": (151936, 4096), "lm_head.weight": (151936, 4096)})
    assert config.own_embeddings and config.draft_vocab_size == 151936
    config = to_canonical(raw, {"norm.weight": (4096,)})
    assert not config.own_embeddings and config.draft_vocab_size is None


def test_a_vocabulary_of_its_own_needs_a_head_of_its_own():
    message = error_of(fixture("speculators-qwen3-8b-dflash"), {"norm.weight": (4096,)})
    assert "`draft_vocab_size` is 32000, but the checkpoint has no `lm_head.weight`" in message


# --- arbitrary values -------------------------------------------------------------------------------------------------

ODD_VALUES = (None, True, -1, 0, 1.5, "x", [], ["x"], [None], [[1]], {}, {"a": 1}, {F: 1}, 10**9, 10**400, [10**400])


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_value_of_any_key_gives_a_configuration_or_an_error(name):
    def outcome(raw: dict, shapes: dict | None) -> bool:
        try:
            return isinstance(to_canonical(raw, shapes), DFlashConfig)
        except CheckpointError:
            return True

    raw = fixture(name)
    for place in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key, value in list(place.items()):
            for odd in ODD_VALUES:
                place[key] = odd
                for shapes in (None, {"fc.weight": (1, 2), "lm_head.weight": (3, 4)}):
                    assert outcome(raw, shapes), (key, odd)
            place[key] = value


def test_an_unknown_key_of_dflash_config_is_a_warning():
    _, reading = read(fixture("qwen3-8b-dflash-b16", nested__twist=3, nested__nothing=None))
    assert reading.warnings == ["`dflash_config.twist` (3) is unknown and is ignored."]


def test_an_unknown_projector_is_rejected():
    message = error_of(fixture("qwen3-8b-dflash-b16", nested__projector_type="newer"))
    assert "`dflash_config.projector_type` is 'newer'" in message and "an unknown kind of draft" in message


# --- types -----------------------------------------------------------------------------------------------------------

BASES = {
    "z-lab": "qwen3-8b-dflash-b16",
    "modelopt": "modelopt-qwen3-8b-dflash",
    "muse": "muse-glimmer-30b-assistant",
    "speculators": "speculators-qwen3-8b-dflash",
}


def edited(name: str, path: str, value: Any) -> dict[str, Any]:
    """A published `config.json` with the value at a dotted path replaced; layer types are removed, so that every key
    that they depend on is read.
    """
    raw = fixture(name)
    for inner in (raw, raw.get("transformer_layer_config", {})):
        inner.pop("layer_types", None)
    *outer, last = path.split(".")
    place = raw
    for key in outer:
        place = place[key]
    place[last] = value
    return raw


@pytest.mark.parametrize("value", [0, False, "", [], "yarn", [4], 1.5])
@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("z-lab", "dflash_config"),
        ("z-lab", "rope_scaling"),
        ("z-lab", "rope_parameters"),
        ("muse", "rope_parameters"),
        ("speculators", "transformer_layer_config"),
        ("speculators", "transformer_layer_config.rope_scaling"),
        ("speculators", "speculators_config"),
        ("speculators", "speculators_config.verifier"),
    ],
)
def test_a_mapping_must_be_one(base, path, value):
    message = error_of(edited(BASES[base], path, value))
    assert f"`{path}`" in message and f"must be a mapping or null; found {value!r}" in message


@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], {}])
@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("z-lab", "use_sliding_window"),
        ("z-lab", "is_causal"),
        ("z-lab", "dflash_config.causal"),
        ("modelopt", "dflash_config.use_swa"),
        ("speculators", "sliding_window_non_causal"),
        ("speculators", "transformer_layer_config.use_sliding_window"),
    ],
)
def test_a_flag_must_be_a_boolean(base, path, value):
    message = error_of(edited(BASES[base], path, value))
    assert f"`{path}`" in message and f"must be true, false or null; found {value!r}" in message


@pytest.mark.parametrize(
    ("base", "path", "value", "needed"),
    [
        ("z-lab", "max_window_layers", "28", "an integer"),
        ("z-lab", "architectures", "DFlashDraftModel", "a list of strings"),
        ("z-lab", "model_type", 3, "a string"),
        ("z-lab", "eos_token_id", "5", "a token id, a list of them"),
        ("speculators", "transformer_layer_config.pad_token_id", [1, None], "a token id, a list of them"),
        ("speculators", "speculators_config.verifier.name_or_path", ["a"], "a string"),
        ("z-lab", "partial_rotary_factor", True, "a number"),
        ("z-lab", "final_logit_softcapping", False, "a number above 0"),
    ],
)
def test_other_values_have_a_type_too(base, path, value, needed):
    message = error_of(edited(BASES[base], path, value))
    assert f"must be {needed}" in message and f"found {value!r}" in message


@pytest.mark.parametrize("value", [0, False, "", {}, []])
@pytest.mark.parametrize("base", BASES.values())
def test_layer_types_that_are_no_list_of_types_are_not_ignored(base, value):
    raw = fixture(base)
    raw.get("transformer_layer_config", raw)["layer_types"] = value
    assert "`layer_types` must be" in error_of(raw)


@pytest.mark.parametrize("layers", [257, 20_000, 10**9, 10**400])
@pytest.mark.parametrize("base", BASES.values())
def test_an_absurd_number_of_layers_is_reported_at_once(base, layers):
    raw = fixture(base)
    inner = raw.get("transformer_layer_config", raw)
    inner["num_hidden_layers"] = layers
    for place in (inner, raw):
        place.pop("layer_types", None)
    raw["is_causal"] = False
    assert "`num_hidden_layers` must be an integer of at least 1 and at most 256" in error_of(raw)


@pytest.mark.parametrize(("key", "value"), [("shift_label", 0), ("is_neox_style", 1), ("logit_scale", True)])
def test_an_option_is_harmless_only_in_its_own_type(key, value):
    assert f"`{key}` (top level) is {value!r}, which is not supported" in error_of(
        {**fixture("qwen3-8b-dflash-b16"), key: value}
    )


def test_a_head_that_is_no_matrix_is_no_head():
    assert to_canonical(fixture("qwen3-8b-dflash-b16"), {"lm_head.weight": ()}).draft_vocab_size is None


# --- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "is_target"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, True),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, True),
        ({"model_type": "someones_own", "architectures": ["OwnForCausalLM"]}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, False),
        ({"model_type": "bert", "architectures": ["BertModel"]}, False),
        ({"model_type": ["qwen3"]}, False),
        ({"speculators_model_type": "eagle3", "model_type": "qwen3"}, False),
        ({}, False),
    ],
)
def test_a_target_in_place_of_a_draft_is_recognized(raw, is_target):
    message = error_of(raw)
    assert "This is not a DFlash draft" in message
    assert ("It looks like a target: if target and draft were swapped" in message) == is_target
