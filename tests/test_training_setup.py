"""Setting up a draft (taps, mask token, configuration, initial weights), cached target states, and settings."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from hf_dflash.draft.errors import TrainingError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training import train
from hf_dflash.training.records import Record, RecordDataset, collate
from hf_dflash.training.settings import TrainingSettings, annotation_of, read_yaml, setting_fields
from hf_dflash.training.setup_draft import (
    check_warm_start,
    check_warm_start_settings,
    choose_mask_token,
    copy_from_target,
    default_taps,
    make_config,
)
from hf_dflash.training.state_cache import CachedStates, build_state_cache, cache_bytes
from hf_dflash.training.states import StateCapture
from tests.tiny_training import VOCABULARY, tiny_settings, tiny_target, write_records


@pytest.fixture(scope="module")
def target():
    return Target(tiny_target())


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [(36, 5, [1, 9, 17, 25, 33]), (30, 5, [1, 8, 14, 20, 27]), (8, 1, [3]), (4, 2, [0, 3]), (6, 3, [1, 2, 3])],
)
def test_default_taps_are_evenly_spread(layers, count, taps):
    assert default_taps(layers, count) == taps


def test_too_many_taps():
    with pytest.raises(TrainingError, match="7 taps do not fit"):
        default_taps(8, 7)


def test_the_mask_token_is_unused(target):
    counts = torch.ones(VOCABULARY, dtype=torch.long)
    counts[[0, 1, 40, 50]] = 0  # 0 is EOS, 1 is padding
    assert choose_mask_token(target, None, counts, None) == 50
    special = {"all_special_ids": [40], "added_tokens_decoder": {}, "__len__": lambda self: 90}
    tokenizer = type("Tokenizer", (), special)()
    assert choose_mask_token(target, tokenizer, counts, None) == 40
    assert choose_mask_token(target, None, counts, 40) == 40
    with pytest.raises(TrainingError, match="every token"):
        choose_mask_token(target, None, torch.ones(VOCABULARY, dtype=torch.long), None)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [(96, "outside the target's 96"), (0, "eos_token_id"), (1, "pad_token_id"), (5, "occurs 3 times")],
)
def test_a_mask_token_that_cannot_be_used(target, wanted, message):
    counts = torch.zeros(VOCABULARY, dtype=torch.long)
    counts[5] = 3
    with pytest.raises(TrainingError, match=message):
        choose_mask_token(target, None, counts, wanted)


def test_the_configuration_is_explicit(target, tmp_path):
    config = make_config(target, tiny_settings(tmp_path, sliding_window=6, version=2), 95)
    assert (config.target_layer_ids, config.mask_token_id, config.block_size) == ([1, 3], 95, 4)
    assert (config.layer_types, config.layer_causal, config.sliding_window) == (["sliding_attention"], [False], 6)
    assert (config.target_num_hidden_layers, config.target_hidden_size, config.vocab_size) == (6, 32, VOCABULARY)
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.eos_token_id is None
    assert make_config(target, tiny_settings(tmp_path, sliding_window=6), 95).layer_causal == [True]


def test_weights_come_from_the_last_layers(target, tmp_path):
    draft = DFlashDraftModel(make_config(target, tiny_settings(tmp_path, layers=2), 95))
    done = copy_from_target(draft, target)
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, target.layers[4].mlp.up_proj.weight)
    assert torch.equal(draft.layers[1].self_attn.k_proj.weight, target.layers[5].self_attn.k_proj.weight)
    taps = torch.randn(1, 3, 64)
    torch.testing.assert_close(draft.fc(taps), taps.unflatten(-1, (2, 32)).mean(-2))
    assert "layers.0.self_attn.q_norm.weight" not in done  # a Llama has none


def test_norms_that_store_scale_minus_one_are_copied_correctly(tmp_path):
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        max_position_embeddings=64,
        pad_token_id=1,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = transformers.Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
    model.model.norm.weight.fill_(0.5)
    hybrid = Target(model)
    draft = DFlashDraftModel(make_config(hybrid, tiny_settings(tmp_path, layers=2), 95))
    done = copy_from_target(draft, hybrid)
    torch.testing.assert_close(draft.norm.weight, torch.full((32,), 1.5))
    # Only attention layers are copied, without the query projection, which here also computes a gate.
    assert torch.equal(draft.layers[0].self_attn.k_proj.weight, model.model.layers[1].self_attn.k_proj.weight)
    assert not any("q_proj" in name for name in done)


def test_a_warm_start_must_fit(target, tmp_path):
    draft = DFlashDraftModel(make_config(target, tiny_settings(tmp_path), 95))
    check_warm_start(draft, target, tiny_settings(tmp_path))
    with pytest.raises(TrainingError, match="block_size 4, but the settings have 8"):
        check_warm_start(draft, target, tiny_settings(tmp_path, block_size=8))
    with pytest.raises(TrainingError, match="target layers 6, but .* has 5"):
        check_warm_start(draft, Target(tiny_target(num_hidden_layers=5)), tiny_settings(tmp_path))
    draft.config.draft_vocab_size = 40
    with pytest.raises(TrainingError, match="its own head for 40 tokens"):
        check_warm_start(DFlashDraftModel(draft.config), target, tiny_settings(tmp_path))


FIXED = {
    "version": 2,
    "layers": 5,  # the default
    "block_size": 16,  # the default
    "taps": [0, 1],
    "num_taps": 5,  # the default
    "mask_token_id": 17,
    "sliding_window": 64,
    "intermediate_size": 77,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rope_theta": 5e6,
    "initial_weights": "target",  # the default
}


@pytest.mark.parametrize("name", FIXED)
def test_what_a_warm_start_fixes_is_refused_when_given_otherwise(target, tmp_path, name):
    """Also if it is the default value of the setting: that was asked for, and the draft does not have it."""
    draft = DFlashDraftModel(make_config(target, tiny_settings(tmp_path), 95))
    given = tiny_settings(tmp_path, **{name: FIXED[name]})
    with pytest.raises(TrainingError, match=f"warm_start: .*do not set {name}$"):
        check_warm_start(draft, target, given)
    with pytest.raises(TrainingError, match=f"do not set {name}$"):
        check_warm_start_settings(draft.config, given)
    # Settings that were not given do not matter, nor does naming what the draft has.
    check_warm_start_settings(draft.config, TrainingSettings(warm_start="d"))
    if name not in ("initial_weights", "num_taps"):  # five taps do not fit this target
        check_warm_start_settings(make_config(target, given, given.mask_token_id or 95), given)


def test_all_that_a_warm_start_contradicts_is_listed(target, tmp_path):
    config = make_config(target, tiny_settings(tmp_path, sliding_window=6), 95)
    settings = TrainingSettings(block_size=16, layers=5, sliding_causal=False, initial_weights="random")
    with pytest.raises(TrainingError, match="do not set layers, block_size, sliding_causal, initial_weights$"):
        check_warm_start_settings(config, settings)
    second = make_config(target, tiny_settings(tmp_path, version=2), 95)
    with pytest.raises(TrainingError, match="do not set conv_kernel_size, selector_top_k$"):
        check_warm_start_settings(second, TrainingSettings(conv_kernel_size=3, selector_top_k=16))


def test_settings_know_what_was_given(tmp_path):
    settings = TrainingSettings("t", "d", block_size=16)
    assert settings.given == {"target", "data", "block_size"}
    assert TrainingSettings().given == set()
    assert replace(settings, layers=3).given == {"target", "data", "block_size", "layers"}
    assert settings == TrainingSettings("t", "d") and pickle.loads(pickle.dumps(settings)).given == settings.given
    settings.to_yaml(tmp_path / "s.yaml")
    assert TrainingSettings.from_yaml(tmp_path / "s.yaml").given == settings.given
    (tmp_path / "by_hand.yaml").write_text("block_size: 16\nlayers: 3\n")
    assert TrainingSettings.from_yaml(tmp_path / "by_hand.yaml").given == {"block_size", "layers"}
    read = read_yaml(tmp_path / "s.yaml") | {"seed": 3}  # as edited by hand
    flags = TrainingSettings.from_mapping(read, "s.yaml", flags={"num_taps": 5, "block_size": 8})
    assert flags.given == {"target", "data", "block_size", "seed", "num_taps"} and flags.block_size == 8
    with pytest.raises(TrainingError, match="`given` must be a list of names"):
        TrainingSettings.from_mapping({"given": ["blocksize"]}, "s.yaml")


def test_paths_are_taken_as_settings(tmp_path):
    settings = TrainingSettings(target=tmp_path, data=tmp_path / "d.jsonl", out=tmp_path / "o").check()
    assert (settings.target, settings.out) == (str(tmp_path), str(tmp_path / "o"))


def test_states_are_layer_outputs_before_the_final_norm(target):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    states = StateCapture(target, [1, 5], with_final=True)(ids)
    seen = {}
    hook = target.layers[5].register_forward_hook(lambda m, i, o: seen.update(last=o if torch.is_tensor(o) else o[0]))
    out = target.model.model(ids, output_hidden_states=True)
    hook.remove()
    torch.testing.assert_close(states.taps, torch.cat([out.hidden_states[2], seen["last"]], -1))
    torch.testing.assert_close(states.final, out.last_hidden_state)
    assert not torch.allclose(seen["last"], out.last_hidden_state)


def some_records():
    return [Record(str(n), (5, 6, 7), tuple(range(10, 15 + n))) for n in range(5)]


def description():
    return {"target": "tiny", "taps_width": 64, "final_width": 32}


@pytest.mark.parametrize("with_final", [True, False])
def test_cached_states_are_the_captured_ones(target, tmp_path, with_final):
    capture = StateCapture(target, [1, 4], with_final=with_final)
    records = some_records()
    folder = build_state_cache(tmp_path / "s", records, capture, description(), batch_size=2, rows_per_shard=20)
    assert len(list(folder.glob("*.safetensors"))) > 1
    cached = CachedStates(folder)
    for record in records:
        states = capture(torch.tensor([record.prompt_ids + record.response_ids]))
        taps, final = cached[record.digest]
        assert torch.equal(taps, states.taps[0].bfloat16())
        assert final is None if not with_final else torch.equal(final, states.final[0].bfloat16())
    batch = collate([RecordDataset(records, cached)[index] for index in (0, 3)])
    assert batch["taps"].shape == (2, 11, 64) and ("final" in batch) == with_final


def test_a_state_cache_is_not_mistaken_for_another(target, tmp_path):
    capture = StateCapture(target, [1, 4])
    build_state_cache(tmp_path, some_records(), capture, description())
    before = (tmp_path / "index.json").stat().st_mtime_ns
    build_state_cache(tmp_path, some_records()[:2], capture, description())
    assert (tmp_path / "index.json").stat().st_mtime_ns == before
    with pytest.raises(TrainingError, match="different target states"):
        build_state_cache(tmp_path, some_records(), capture, {**description(), "target": "other"})
    with pytest.raises(TrainingError, match="different target states"):
        build_state_cache(tmp_path, [*some_records(), Record("new", (5,), (6, 7))], capture, description())


def test_a_full_disk_is_reported_before_and_while_writing(target, tmp_path, monkeypatch):
    capture = StateCapture(target, [1, 4])
    assert cache_bytes(1000, 64, 32) == 192_000
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
        with pytest.raises(TrainingError, match=r"50 tokens need 0\.00 GB"):
            build_state_cache(tmp_path / "a", some_records(), capture, description())

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_dflash.training.state_cache.save_file", full)
    with pytest.raises(TrainingError, match="is the disk full"):
        build_state_cache(tmp_path / "b", some_records(), capture, description())
    assert list((tmp_path / "b").iterdir()) == []


def test_settings_round_trip_through_yaml(tmp_path):
    settings = tiny_settings(tmp_path, taps=[1, 2], learning_rate=3e-4, gamma=2.5)
    settings.to_yaml(tmp_path / "s.yaml")
    assert TrainingSettings.from_yaml(tmp_path / "s.yaml") == settings
    (tmp_path / "t.yaml").write_text("learning_rate: 6e-4\nepochs: 2\n")
    read = TrainingSettings.from_yaml(tmp_path / "t.yaml")
    assert (read.learning_rate, read.epochs) == (6e-4, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocksize: 8", "unknown settings blocksize"),
        ("block_size: eight", "`block_size` must be int; found 'eight'"),
        ("taps: 3", "`taps` must be"),
        ("- 1", "expected a mapping"),
        ("a: [", "invalid YAML"),
    ],
)
def test_settings_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(TrainingError, match=message):
        TrainingSettings.from_yaml(tmp_path / "s.yaml")


def test_all_problems_in_settings_are_reported_at_once():
    with pytest.raises(TrainingError) as error:
        TrainingSettings(target="t", version=3, distillation=2.0, block_size=1, d_pace_alpha=0.0).check()
    for name in ("data", "out", "version", "distillation", "block_size", "d_pace_alpha"):
        assert f"`{name}`" in str(error.value)


INVALID = {
    "target_dtype": ["bf16", "int4", "nn"],
    "device": ["cuda:1" if not torch.cuda.is_available() else "cuda:99", "gpu", "mps:7"],
    "warmup": [5.0, 1.0, -1.0],
    "epochs": [-1.0, 0.0, float("inf")],
    "max_steps": [0, -2],
    "batch_size": [0, -1, True, 2.0],
    "block_size": [1, "16", 10**9],
    "layers": [0, 10**9],
    "save_every": [0, -5],
    "final_prompts": [-1],
    "final_tokens": [0, -3],
    "learning_rate": [-1.0, float("nan"), "6e-4", 10**30],
    "clip": [-1.0],
    "weight_decay": [-5.0],
    "seed": [-1, 2**40],
    "taps": [[-1], [], [2, 2], [1.0], 3],
    "num_attention_heads": [0],
    "head_dim": [7],
    "sliding_window": [0, -4],
    "rope_theta": [-1.0, 0.0],
    "intermediate_size": [-8],
    "selector_weight": [-1.0],
    "selector_top_k": [0],
    "selector_rank": [0],
    "mask_token_id": [-1],
    "max_length": [4],
    "loss_vocabulary": [3],
    "trust_remote_code": ["false", 0],
    "sliding_causal": ["no"],
    "report_to": ["wandbb", "neptune"],
    "layout": ["z-lab"],
    "out": [""],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_a_setting_that_cannot_be_meant_is_refused_by_name(tmp_path, name, value):
    """Before the target is loaded, which is not there."""
    write_records(tmp_path / "data.jsonl")
    with pytest.raises(TrainingError, match=f"^invalid training settings: `{name}` "):
        train(tiny_settings(tmp_path, target=str(tmp_path / "nowhere"), **{name: value}))
    assert not (tmp_path / "run").exists()


def test_every_setting_has_limits_where_it_can():
    """A new number must come with a minimum or a lower bound, a new word with its choices (or a check of its own)."""
    free = {"target", "data", "out", "warm_start", "states_dir", "device", "report_to"}
    for item in setting_fields():
        kind = annotation_of(item).split(" |")[0]
        if kind in ("int", "float"):
            assert {"minimum", "above", "choices"} & set(item.metadata), item.name
        elif kind == "str":
            assert "choices" in item.metadata or item.name in free, item.name


def test_devices_of_this_machine_are_taken(tmp_path, monkeypatch):
    tiny_settings(tmp_path, device="cpu").check()
    tiny_settings(tmp_path, device=None).check()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    tiny_settings(tmp_path, device="cuda").check()
    with pytest.raises(TrainingError, match="one of cpu, cuda, .*found 'cuda:1'. Choose .* with CUDA_VISIBLE_DEVICES"):
        tiny_settings(tmp_path, device="cuda:1").check()


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": [99]},
        {"num_taps": 7},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3},
        {"version": 2, "conv_group_size": 7},
        {"version": 2, "selector_top_k": 4096},
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_target_are_refused_before_its_weights_are_loaded(tmp_path, changes):
    write_records(tmp_path / "data.jsonl")
    tiny_target().config.save_pretrained(tmp_path / "target")  # without weights
    with pytest.raises(TrainingError, match="taps do not fit|do not fit the target"):
        train(tiny_settings(tmp_path, target=str(tmp_path / "target"), **changes))
    assert not (tmp_path / "run").exists()
