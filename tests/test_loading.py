"""Loading drafts: every layout, every kind of broken checkpoint, dtypes, adoption, pairing."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from published import PUBLISHED, SLIDING, publish
from tiny_drafts import tiny_config, tiny_draft
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import CheckpointError, DraftDtypeError, PairingError, UnsupportedOptionError
from hf_dflash.draft.loading import (
    TargetFacts,
    adopt_draft,
    check_pairing,
    checkpoint,
    is_draft,
    is_draft_checkpoint,
    load_draft,
)
from hf_dflash.draft.modeling_dflash import DFlash2DraftModel, DFlashDraftModel
from hf_dflash.target.target import Target

# Values about the target or the file, not the network; a layout may not have them.
ABOUT_THE_CHECKPOINT = {
    "_name_or_path",
    "dtype",
    "source_layout",
    "initializer_range",
    "target_name_or_path",
    "target_vocab_size",
    "target_num_hidden_layers",
}


def error_of(folder: Path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, **options)
    return str(caught.value)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def forward(draft: DFlashDraftModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 4, draft.config.hidden_size, generator=generator)
    context = torch.randn(1, 5, draft.config.context_size, generator=generator)
    with torch.no_grad():
        return draft(noise, context).last_hidden_state


# --- what loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PUBLISHED)
def test_every_layout_loads_as_published(tmp_path, layout):
    published = publish(tmp_path, layout)
    draft = load_draft(tmp_path)
    assert_same_weights(draft, published)
    mine, others = draft.config.to_dict(), published.config.to_dict()
    # Muse's configuration has no vocabulary size.
    ignored = ABOUT_THE_CHECKPOINT | ({"vocab_size"} if layout == "muse" else set())
    assert {key: value for key, value in mine.items() if key not in ignored} == {
        key: value for key, value in others.items() if key not in ignored
    }
    assert isinstance(draft, DFlash2DraftModel) == (draft.config.dflash_version == 2)
    assert draft.dtype == torch.bfloat16 and not draft.training
    assert torch.equal(forward(draft), forward(published))


def test_from_pretrained_also_loads_every_layout(tmp_path):
    published = publish(tmp_path, "muse")
    draft = DFlashDraftModel.from_pretrained(tmp_path, attn_implementation="eager", torch_dtype=torch.float32)
    assert draft.dtype == torch.float32 and draft.config._attn_implementation == "eager"
    assert_same_weights(draft.to(torch.bfloat16), published)


def test_loading_info_is_returned_as_in_transformers(tmp_path):
    publish(tmp_path)
    draft, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert draft.name_or_path == str(tmp_path)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_sharded_weights(tmp_path):
    published = publish(tmp_path, "dflash2", shards=3)
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_weights(load_draft(tmp_path), published)


def test_device_map(tmp_path):
    published = publish(tmp_path)
    for device_map in ("cpu", "auto", {"": "cpu"}):
        assert_same_weights(load_draft(tmp_path, device_map=device_map), published)


def test_a_draft_saved_over_its_own_files_loads_again(tmp_path):
    published = publish(tmp_path, "speculators")
    draft = load_draft(tmp_path)
    draft.save_pretrained(tmp_path)
    again = load_draft(tmp_path)
    assert_same_weights(again, published)
    assert_same_weights(draft, published)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dflash"
    assert again.config.source_layout == "speculators"


def test_own_vocabulary_gives_target_ids(tmp_path):
    published = publish(tmp_path, "speculators")
    draft = load_draft(tmp_path).float()
    ids = set((torch.arange(32) + published.d2t).tolist())
    proposed = draft.propose(torch.randn(4, 7, 64), torch.zeros(4, dtype=torch.long), head=nn.Identity())
    assert set(proposed.flatten().tolist()) <= ids and proposed.max() >= 32


def test_a_head_of_its_own_for_the_full_vocabulary_needs_no_mapping(tmp_path):
    draft = tiny_draft(draft_vocab_size=128)
    draft.d2t.zero_()
    publish(tmp_path, draft=draft, edit_tensors=lambda tensors: tensors.pop("d2t"))
    loaded = load_draft(tmp_path).float()
    hidden = torch.randn(1, 3, 64)
    expected = loaded.lm_head(hidden).argmax(-1)
    assert torch.equal(loaded.propose(hidden, torch.zeros(1, dtype=torch.long), head=nn.Identity()), expected)


def test_a_smaller_block_can_be_requested(tmp_path):
    publish(tmp_path)
    assert load_draft(tmp_path, block_size=4).config.block_size == 4
    with pytest.raises(UnsupportedOptionError, match="from 2 to 8, found 9"):
        load_draft(tmp_path, block_size=9)


def test_a_special_mask_token_is_a_warning(tmp_path):
    publish(tmp_path, edit=lambda raw: raw.update(eos_token_id=127))
    with pytest.warns(UserWarning, match="`mask_token_id` \\(127\\) is also `eos_token_id`"):
        load_draft(tmp_path)


def test_a_valid_checkpoint_loads_without_a_warning(tmp_path):
    publish(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(tmp_path)


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "configured", "requested", "expected"),
    [
        (torch.bfloat16, None, None, torch.bfloat16),
        (torch.float32, None, None, torch.float32),
        (torch.float32, "bfloat16", None, torch.bfloat16),
        (torch.bfloat16, "float32", "auto", torch.float32),
        (torch.bfloat16, "bfloat16", "float32", torch.float32),
        (torch.bfloat16, "float16", torch.bfloat16, torch.bfloat16),
        (torch.float16, None, torch.float32, torch.float32),
    ],
)
def test_dtype_is_the_requested_one_then_the_configurations_then_the_stored_one(
    tmp_path, stored, configured, requested, expected
):
    publish(tmp_path, dtype=stored, edit=lambda raw: raw.update(torch_dtype=configured))
    draft = load_draft(tmp_path, dtype=requested)
    assert {weight.dtype for weight in draft.parameters()} == {expected}
    assert draft.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("stored", "configured", "requested", "source"),
    [
        (torch.bfloat16, "bfloat16", torch.float16, "was requested"),
        (torch.bfloat16, "bfloat16", "float16", "was requested"),
        (torch.bfloat16, "float16", None, "is the checkpoint's dtype"),
        (torch.float16, None, None, "is the checkpoint's dtype"),
    ],
)
def test_float16_is_rejected_with_the_reason(tmp_path, stored, configured, requested, source):
    publish(tmp_path, dtype=stored, edit=lambda raw: raw.update(torch_dtype=configured))
    for load in (load_draft, DFlashDraftModel.from_pretrained):
        with pytest.raises(DraftDtypeError) as caught:
            load(tmp_path, dtype=requested)
        assert f"float16 {source}" in str(caught.value)
        assert "outliers" in str(caught.value) and "torch.bfloat16" in str(caught.value)


def test_an_invalid_dtype_is_rejected(tmp_path):
    publish(tmp_path)
    for dtype in (torch.int8, "bfloat17"):
        with pytest.raises(DraftDtypeError, match="a draft runs in bfloat16 or float32"):
            load_draft(tmp_path, dtype=dtype)


# --- broken checkpoints ----------------------------------------------------------------------------------------------


def test_missing_tensors_are_listed(tmp_path):
    publish(
        tmp_path, edit_tensors=lambda tensors: [tensors.pop(name) for name in ("norm.weight", "hidden_norm.weight")]
    )
    message = error_of(tmp_path)
    assert "2 tensors are missing: hidden_norm.weight, norm.weight." in message
    assert str(tmp_path) in message


def test_unexpected_tensors_are_listed_ten_at_most_and_a_count(tmp_path):
    extra = {f"extra.{index:02d}": torch.zeros(1) for index in range(13)}
    publish(tmp_path, edit_tensors=lambda tensors: tensors.update(extra))
    message = error_of(tmp_path)
    assert "13 tensors are unexpected" in message
    assert "extra.09 and 3 more" in message and "extra.10" not in message


def test_misshaped_tensors_are_listed_with_both_shapes(tmp_path):
    publish(tmp_path, edit_tensors=lambda tensors: tensors.update({"norm.weight": torch.ones(32)}))
    assert "1 tensor is of the wrong shape" in error_of(tmp_path)
    assert "norm.weight (32,) instead of (64,)" in error_of(tmp_path)


def test_tensors_that_are_unused_only_in_another_layout_are_unexpected(tmp_path):
    publish(tmp_path, edit_tensors=lambda tensors: tensors.update(t2d=torch.ones(128)))
    assert "1 tensor is unexpected (not part of the network): t2d." in error_of(tmp_path)


def test_all_problems_are_listed_at_once(tmp_path):
    publish(tmp_path, edit=lambda raw: raw.update(block_size=1, rope_theta=None))
    message = error_of(tmp_path)
    assert "2 problems:" in message and "`block_size`" in message and "`rope_theta`" in message


def test_a_second_tensor_of_the_same_name_is_rejected(tmp_path):
    name = "candidate_selector.successor_codebook"
    publish(tmp_path, "dflash2", edit_tensors=lambda tensors: tensors.update({f"{name}.weight": tensors[name].clone()}))
    assert f"Two tensors of the checkpoint map to `{name}`" in error_of(tmp_path)


def test_taps_that_do_not_fit_fc(tmp_path):
    publish(tmp_path, edit=lambda raw: raw["dflash_config"].update(target_layer_ids=[0, 1, 2]))
    assert "3 taps of width 64 make 192 inputs, but `fc.in_features` is 128 (2 taps)" in error_of(tmp_path)


def test_truncated_safetensors(tmp_path):
    publish(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = error_of(tmp_path)
    assert "model.safetensors cannot be read as safetensors" in message and "truncated or corrupted" in message
    path.write_bytes(b"not safetensors")
    assert "cannot be read as safetensors" in error_of(tmp_path)


def test_a_truncated_shard_and_a_missing_one(tmp_path):
    publish(tmp_path, shards=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-10])
    assert "model-00002-of-00003.safetensors cannot be read" in error_of(tmp_path)
    second.unlink()
    message = error_of(tmp_path)
    assert "lists missing files: model-00002-of-00003.safetensors" in message


def test_a_corrupted_index(tmp_path):
    publish(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json is not a valid index" in error_of(tmp_path)


def test_pickled_weights_are_rejected(tmp_path):
    publish(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = error_of(tmp_path)
    assert "only available as pickles (pytorch_model.bin)" in message and "Only safetensors are supported" in message


def test_weights_must_not_be_missing(tmp_path):
    publish(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors is missing" in error_of(tmp_path)


def test_the_configuration_must_be_readable(tmp_path):
    publish(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in error_of(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "contains a list, not a configuration" in error_of(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in error_of(tmp_path)
    assert "is not a folder" in error_of(tmp_path / "model.safetensors")


def test_an_ordinary_model_is_not_a_draft(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    assert "This is not a DFlash draft (llama" in error_of(tmp_path)
    assert not is_draft_checkpoint(tmp_path)


def test_a_separate_mask_embedding_is_rejected(tmp_path):
    publish(tmp_path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    assert "this is a MiMo draft" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.arange(32) + 100, "maps 18 draft tokens outside the target's vocabulary of 128"),
        (-torch.arange(32), "31 onto ids already taken"),
    ],
)
def test_an_invalid_mapping_is_rejected(tmp_path, offsets, message):
    publish(tmp_path, "speculators", edit_tensors=lambda tensors: tensors.update(d2t=offsets))
    raised = error_of(tmp_path)
    assert message in raised and "it must hold offsets" in raised.lower()


# --- the Hub ---------------------------------------------------------------------------------------------------------


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A fake Hub with one repository, `some/draft`; returns its folder and the requests."""
    folder = tmp_path / "snapshots" / COMMIT
    publish(folder, shards=2)
    requests = []

    def download(repo, filename, **options):
        requests.append((repo, filename, options))
        if not (folder / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    monkeypatch.setattr(checkpoint, "list_repo_files", lambda repo, **options: [path.name for path in folder.iterdir()])
    return folder, requests


def test_a_draft_from_the_hub_comes_from_one_commit(hub):
    _, requests = hub
    draft = load_draft("some/draft", revision="main", token="secret", cache_dir="cache")
    assert draft.name_or_path == "some/draft"
    assert {(repo, options["token"], options["cache_dir"]) for repo, _, options in requests} == {
        ("some/draft", "secret", "cache")
    }
    assert requests[0][1:] == ("config.json", {"revision": "main", "token": "secret", "cache_dir": "cache"})
    assert {options["revision"] for _, _, options in requests[1:]} == {COMMIT}


def test_pickled_weights_on_the_hub_are_rejected(hub):
    folder, _ = hub
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "only available as pickles (pytorch_model.bin)" in error_of("some/draft")


def test_an_unreachable_repository(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(checkpoint, "hf_hub_download", offline)
    message = error_of("some/draft")
    assert "neither a local folder nor a reachable Hub repository" in message and "no network" in message
    assert not is_draft_checkpoint("some/draft")

    def not_cached(*_, **__):
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(checkpoint, "hf_hub_download", not_cached)
    assert "neither a local folder nor a reachable Hub repository: not in the cache" in error_of("some/draft")


def test_a_name_that_is_neither_folder_nor_repository():
    assert "neither a local folder nor a reachable Hub repository" in error_of("no such/folder/at all")


# --- memory ----------------------------------------------------------------------------------------------------------


MEASURE = """
import sys
import torch
from pathlib import Path
from hf_dflash.draft.loading import load_draft

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

before = peak()
draft = load_draft(sys.argv[1])
for weight in draft.parameters():
    weight.max()
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_weights_are_in_memory_once(tmp_path):
    """Loading and reading every weight takes at most 1.2 times the file size, measured in a separate process."""
    config = tiny_config(vocab_size=2**14, own_embeddings=True, hidden_size=2048)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DFlashDraftModel(config).state_dict().items()}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    publish(
        tmp_path,
        "canonical",
        edit=lambda raw: raw.update(config.to_dict(), dtype="bfloat16"),
        edit_tensors=lambda example: (example.clear(), example.update(tensors)),
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 100e6
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout.split()[-1]) < 1.2 * size


# --- foreign objects -------------------------------------------------------------------------------------------------


def authors_draft(folder: Path, version: int) -> nn.Module:
    """A draft loaded by z-lab's own code."""
    reference = pytest.importorskip("dflash.model")
    layout = "dflash2" if version == 2 else "z-lab"
    publish(folder, layout, edit=lambda raw: raw.update(use_sliding_window=True))
    # Each side derives the causality of its layers itself; ours must come to the same result.
    cls = reference.DFlash2DraftModel if version == 2 else reference.DFlashDraftModel
    return cls.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("version", [1, 2])
def test_an_authors_draft_is_adopted_without_copying(tmp_path, version):
    foreign = authors_draft(tmp_path, version)
    assert is_draft(foreign)
    draft = adopt_draft(foreign)
    assert isinstance(draft, DFlash2DraftModel) == (version == 2)
    mine, theirs = dict(draft.named_parameters()), dict(foreign.named_parameters())
    assert len(mine) == len(theirs)
    for name, parameter in mine.items():
        published = f"{name}.weight" if name.endswith("_codebook") else name
        assert parameter is theirs[published]
        assert parameter.data_ptr() == theirs[published].data_ptr()
    assert not draft.training and draft.rotary_emb.inv_freq.device.type == "cpu"
    loaded = load_draft(tmp_path)
    assert torch.equal(forward(draft), forward(loaded))
    assert draft.config.target_layer_ids == loaded.config.target_layer_ids


def test_transformers_muse_assistant_is_adopted(tmp_path):
    from transformers import MuseGlimmerAssistantModel

    publish(tmp_path, "muse")
    foreign = MuseGlimmerAssistantModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    draft = adopt_draft(foreign)
    assert draft.fc.weight.data_ptr() == foreign.encoder.fc.weight.data_ptr()
    assert torch.equal(forward(draft), forward(load_draft(tmp_path)))


def test_our_own_draft_is_returned_as_is():
    draft = tiny_draft()
    assert is_draft(draft) and adopt_draft(draft) is draft


def test_other_objects_are_not_drafts():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    ordinary = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    for candidate in (ordinary, nn.Linear(2, 2), None, "a/name", tiny_config()):
        assert not is_draft(candidate)
    with pytest.raises(CheckpointError, match="This is not a DFlash draft"):
        adopt_draft(ordinary)
    with pytest.raises(CheckpointError, match="A Linear is not a DFlash draft"):
        adopt_draft(nn.Linear(2, 2))


def test_a_relative_is_a_draft_that_is_rejected_by_name(tmp_path):
    foreign = authors_draft(tmp_path, 1)
    foreign.config.dflash_config["projector_type"] = "domino"
    assert is_draft(foreign)
    with pytest.raises(CheckpointError, match="This is a Domino draft"):
        adopt_draft(foreign)


def test_a_foreign_draft_in_float16_is_rejected(tmp_path):
    with pytest.raises(DraftDtypeError, match="outliers"):
        adopt_draft(authors_draft(tmp_path, 1).half())


def test_a_foreign_draft_without_taps_is_rejected(tmp_path):
    foreign = authors_draft(tmp_path, 1)
    del foreign.config.dflash_config["target_layer_ids"]
    with pytest.raises(CheckpointError, match="`target_layer_ids` is missing"):
        adopt_draft(foreign)


def test_a_draft_folder_is_recognized_by_its_configuration(tmp_path):
    publish(tmp_path / "draft")
    publish(tmp_path / "relative", edit=lambda raw: raw["dflash_config"].update(projector_type="domino"))
    (tmp_path / "empty").mkdir()
    assert is_draft_checkpoint(tmp_path / "draft") and is_draft_checkpoint(str(tmp_path / "relative"))
    assert not is_draft_checkpoint(tmp_path / "empty") and not is_draft_checkpoint(tmp_path / "nowhere")


# --- pairing ---------------------------------------------------------------------------------------------------------


def facts(**changes) -> TargetFacts:
    values = {"name": "the/target", "hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 6, "num_embeddings": 128}
    return TargetFacts(**{**values, **changes})


def named_config(**overrides) -> DFlashConfig:
    config = tiny_config(target_vocab_size=128, target_num_hidden_layers=6, **overrides)
    config.name_or_path = "the/draft"
    return config


def test_a_matching_pair_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pairing(named_config(), facts(special_ids={"eos_token_id": [2, 3], "pad_token_id": None}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 32}, "the/draft reads hidden states of size 64, those of the/target have size 32"),
        ({"vocab_size": 256}, "the/draft was trained on a vocabulary of 128, the/target has one of 256"),
        ({"num_hidden_layers": 8}, "the/draft was trained on a target of 6 layers, the/target has 8"),
        ({"num_hidden_layers": 2}, "the/draft taps the layers [0, 2], the/target has 2, 0 to 1"),
        ({"num_embeddings": 127}, "The mask token of the/draft is 127, but the/target embeds 127 tokens, 0 to 126"),
    ],
)
def test_a_mismatch_names_both_sides_and_their_values(changes, problem):
    with pytest.raises(PairingError) as caught:
        check_pairing(named_config(), facts(**changes))
    message = str(caught.value)
    assert problem in message
    assert message.startswith("The draft the/draft and the target the/target do not match")
    assert message.endswith("Use a draft that was trained for this target.")


def test_every_mismatch_is_named_and_so_is_the_target_it_was_trained_for():
    with pytest.raises(PairingError) as caught:
        check_pairing(
            named_config(target_name_or_path="its/own"), facts(hidden_size=32, vocab_size=7, num_embeddings=7)
        )
    message = str(caught.value)
    assert "size 32" in message and "one of 7" in message and "The draft was trained for its/own." in message


def test_a_draft_of_another_width_needs_embeddings_and_head():
    reads = {"target_hidden_size": 32}
    with pytest.raises(PairingError, match="has hidden size 64 and no embeddings and head of its own"):
        check_pairing(named_config(**reads), facts(hidden_size=32))
    check_pairing(named_config(**reads, own_embeddings=True, draft_vocab_size=16), facts(hidden_size=32))


def test_a_special_mask_token_of_the_target_is_a_warning():
    with pytest.warns(UserWarning, match="the/draft with the target the/target: `mask_token_id` .127. is also `eos"):
        check_pairing(named_config(), facts(special_ids={"eos_token_id": 127}))


def test_a_loaded_target_is_checked_against_the_draft():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))
    target = Target(model)
    found = TargetFacts.of_target(target)
    assert (found.hidden_size, found.vocab_size, found.num_hidden_layers, found.num_embeddings) == (64, 128, 6, 128)
    assert found.special_ids["pad_token_id"] == 0
    check_pairing(tiny_draft(target_vocab_size=128), target)
    with pytest.raises(PairingError, match="a vocabulary of 64"):
        check_pairing(tiny_draft(vocab_size=64, target_vocab_size=64), target)


def test_a_targets_configuration_is_enough():
    config = Qwen3Config(hidden_size=64, vocab_size=128, num_hidden_layers=6, eos_token_id=5)
    found = TargetFacts.of_config("the/target", config)
    assert (found.hidden_size, found.vocab_size, found.num_hidden_layers) == (64, 128, 6)
    assert found.special_ids["eos_token_id"] == 5


def test_layouts_with_sliding_layers_are_among_those_tested():
    assert any(make().config.layer_types == SLIDING for make, _, _ in PUBLISHED.values())
