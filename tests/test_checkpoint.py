"""The files of a checkpoint: damaged, misleading or absurd ones are reported by name, never raw, never after a hang."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from published import PUBLISHED, publish
from tiny_drafts import tiny_draft
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dflash.draft.errors import CheckpointError, DFlashError, DraftDtypeError
from hf_dflash.draft.inspection import inspect_draft
from hf_dflash.draft.loading import adopt_draft, checkpoint, is_draft_checkpoint, load_draft

INDEX = "model.safetensors.index.json"


def error_of(folder: Path | str, **options) -> str:
    """Return the message that a checkpoint is rejected with, which takes no time."""
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, **options)
    assert time.perf_counter() - start < 10
    assert len(str(caught.value)) < 5000
    return str(caught.value)


# --- stored values ---------------------------------------------------------------------------------------------------

DTYPES = {
    "I8": lambda weight: (weight.float() * 50).to(torch.int8),
    "U8": lambda weight: (weight.float() * 50).to(torch.uint8),
    "I64": lambda weight: weight.long(),
    "BOOL": lambda weight: weight > 0,
    "C64": lambda weight: weight.to(torch.complex64),
    "F8_E4M3": lambda weight: weight.to(torch.float8_e4m3fn),
    "F8_E5M2": lambda weight: weight.to(torch.float8_e5m2),
}


def replace(name: str, change: Callable) -> Callable[[dict], None]:
    """Return an edit of one tensor, or of all with the name "*"."""

    def edit(tensors: dict) -> None:
        for key in tensors if name == "*" else [name]:
            tensors[key] = change(tensors[key])

    return edit


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["default", "requested"])
@pytest.mark.parametrize("name", ["*", "fc.weight", "layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("stored", DTYPES)
def test_weights_in_a_dtype_without_meaning_are_rejected(tmp_path, stored, name, dtype):
    publish(tmp_path, edit_tensors=replace(name, DTYPES[stored]))
    message = error_of(tmp_path, dtype=dtype)
    shown = "fc.weight" if name == "*" else name
    assert "stored in a dtype that cannot be loaded" in message and f"{shown} ({stored})" in message
    assert any(f"{shown} ({stored})" in problem for problem in inspect_draft(tmp_path).problems)


def test_offsets_of_another_vocabulary_are_integers(tmp_path):
    published = publish(tmp_path, "speculators", edit_tensors=replace("d2t", lambda offsets: offsets.int()))
    assert torch.equal(load_draft(tmp_path).d2t, published.d2t)
    publish(tmp_path, "speculators", edit_tensors=replace("d2t", lambda offsets: offsets.float()))
    assert "d2t (F32)" in error_of(tmp_path)


def test_unused_tensors_may_have_any_dtype(tmp_path):
    unused = {"verifier_norm.weight": torch.ones(64, dtype=torch.float16), "t2d": torch.ones(128, dtype=torch.bool)}
    publish(tmp_path, "speculators", edit_tensors=lambda tensors: tensors.update(unused))
    assert load_draft(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["*", "fc.weight"])
@pytest.mark.parametrize("configured", ["bfloat16", "float32", None])
def test_float16_weights_need_a_requested_dtype_whatever_the_configuration_says(tmp_path, configured, name):
    publish(
        tmp_path,
        edit=lambda raw: raw.update(torch_dtype=configured),
        edit_tensors=replace(name, lambda weight: weight.half()),
    )
    with pytest.raises(DraftDtypeError, match="weights are stored in it.*outliers.*torch.bfloat16"):
        load_draft(tmp_path)
    assert any("float16 is the checkpoint's dtype" in problem for problem in inspect_draft(tmp_path).problems)
    for dtype in (torch.bfloat16, torch.float32):
        assert load_draft(tmp_path, dtype=dtype).dtype == dtype


@pytest.mark.parametrize(
    ("layout", "value"),
    [("z-lab", math.inf), ("z-lab", -math.inf), *((name, math.nan) for name in ("z-lab", "dflash2", "speculators"))],
)
def test_a_single_value_that_is_not_finite_is_found_in_every_tensor(tmp_path, layout, value):
    make, _, tensors_of = PUBLISHED[layout]
    floating = [name for name, tensor in tensors_of(make().state_dict()).items() if tensor.is_floating_point()]
    assert len(floating) > 20

    for index, name in enumerate(floating):

        def spoil(weight: torch.Tensor, at: int = index) -> torch.Tensor:
            spoiled = weight.clone()
            spoiled.view(-1)[(-1, 0)[at % 2]] = value
            return spoiled

        publish(tmp_path, layout, edit_tensors=replace(name, spoil))
        message = error_of(tmp_path)
        assert f"1 tensor has values that are NaN, infinite or too large for torch.bfloat16: {name}." in message


def test_every_tensor_that_is_not_finite_is_named_also_in_shards(tmp_path):
    publish(tmp_path, shards=3, edit_tensors=replace("*", lambda weight: torch.full_like(weight, float("nan"))))
    message = error_of(tmp_path)
    assert "tensors have values that are NaN" in message and "and" in message and " more" in message


@pytest.mark.parametrize(
    ("stored", "value", "dtype", "fits"),
    [
        (torch.float32, 3.4e38, torch.bfloat16, False),
        (torch.float32, 3.4e38, torch.float32, True),
        (torch.float32, 1e38, torch.bfloat16, True),
        (torch.float64, 1e300, torch.float32, False),
        (torch.float64, -1e300, torch.bfloat16, False),
        (torch.float16, 65504.0, torch.bfloat16, True),
    ],
)
def test_values_must_fit_the_dtype_that_the_draft_runs_in(tmp_path, stored, value, dtype, fits):
    def spoil(weight: torch.Tensor) -> torch.Tensor:
        return torch.full_like(weight, value, dtype=stored)

    publish(tmp_path, edit_tensors=replace("norm.weight", spoil))
    if fits:
        assert load_draft(tmp_path, dtype=dtype).norm.weight.isfinite().all()
    else:
        assert f"too large for {dtype}: norm.weight." in error_of(tmp_path, dtype=dtype)


# --- the default dtype -----------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    """Run the test with another default dtype than float32."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("layout", ["z-lab", "dflash2", "speculators"])
def test_loading_does_not_depend_on_the_default_dtype(tmp_path, layout, default_dtype):
    torch.set_default_dtype(torch.float32)
    publish(tmp_path, layout, edit=lambda raw: raw.update(torch_dtype="bfloat16"))
    expected = load_draft(tmp_path)
    torch.set_default_dtype(default_dtype)
    for dtype in (None, torch.bfloat16, torch.float32):
        draft = load_draft(tmp_path, dtype=dtype)
        assert {weight.dtype for weight in draft.parameters()} == {dtype or torch.bfloat16}
        assert torch.equal(draft.rotary_emb.inv_freq, expected.rotary_emb.inv_freq)
        assert draft.rotary_emb.inv_freq.dtype == torch.float32
        for name, weight in expected.state_dict().items():
            assert torch.equal(draft.state_dict()[name].to(weight.dtype), weight)
    assert inspect_draft(tmp_path).problems == []
    assert torch.get_default_dtype() == default_dtype


def test_a_foreign_draft_is_adopted_under_any_default_dtype(tmp_path, default_dtype):
    from transformers import MuseGlimmerAssistantModel

    torch.set_default_dtype(torch.float32)
    publish(tmp_path, "muse")
    foreign = MuseGlimmerAssistantModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.set_default_dtype(default_dtype)
    assert adopt_draft(foreign).rotary_emb.inv_freq.dtype == torch.float32


# --- the configuration -----------------------------------------------------------------------------------------------


def at(raw: dict, key: str) -> dict:
    """Return the dictionary of a published configuration that holds a key."""
    inner = (raw.get("dflash_config", {}), raw.get("transformer_layer_config", {}))
    return next((place for place in inner if key in place), raw)


@pytest.mark.parametrize("value", [10**9, 2**63, 10**400, -1, "8"], ids=["10**9", "2**63", "10**400", "-1", "text"])
@pytest.mark.parametrize(
    "key", ["block_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("layout", ["z-lab", "muse", "speculators", "dflash2", "canonical"])
def test_absurd_numbers_are_reported_at_once(tmp_path, layout, key, value):
    publish(tmp_path, layout, edit=lambda raw: at(raw, key).update({key: value}))
    assert f"`{key}` must be an integer" in error_of(tmp_path)
    problems = inspect_draft(tmp_path).problems
    assert any(f"`{key}` must be an integer" in problem for problem in problems)


def test_sizes_in_range_that_do_not_fit_the_tensors_are_reported_at_once(tmp_path):
    many = {"num_hidden_layers": 256, "intermediate_size": 2**20, "num_attention_heads": 2**14}
    publish(tmp_path, edit=lambda raw: (raw.update(many), raw.pop("layer_types")))
    message = error_of(tmp_path)
    assert "tensors are missing" in message and "of the wrong shape" in message


def test_rope_values_that_make_no_frequencies_are_reported(tmp_path):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    publish(tmp_path, edit=lambda raw: raw.update(rope_theta=1.0, rope_scaling=yarn))
    assert "The network cannot be built from this configuration (ZeroDivisionError" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":' * 100_000, "levels deep"),
        ('{"dflash_config": {}, "a": ' + "[" * 100 + "]" * 100 + "}", "levels deep"),
        ('{"dflash_config": {}, "block_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"dflash_config": {}, "block_size": \ud800}', "not valid JSON"),
        ("", "not valid JSON"),
        ("null", "contains a NoneType"),
    ],
    ids=["deep and unfinished", "deep", "5000 digits", "not UTF-8", "empty", "null"],
)
def test_a_configuration_that_cannot_be_parsed(tmp_path, text, expected):
    publish(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert expected in error_of(tmp_path)
    assert any(expected in problem for problem in inspect_draft(tmp_path).problems)
    assert not is_draft_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["nn", "int8", "", 7, [], {"": "bfloat16"}, False])
def test_a_configured_dtype_is_one_that_a_draft_runs_in(tmp_path, dtype):
    publish(tmp_path, edit=lambda raw: raw.update(torch_dtype=dtype))
    with pytest.raises(DraftDtypeError, match="is the checkpoint's dtype, but a draft runs in bfloat16") as caught:
        load_draft(tmp_path)
    assert "module" not in str(caught.value)
    assert load_draft(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


# --- the index of sharded weights ------------------------------------------------------------------------------------


def map_all_to(folder: Path, file: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
        "x" * 5000,
        "\ud800",
        5,
        None,
        ["x"],
        {"x": 1},
    ],
    ids=repr,
)
def test_an_index_names_only_files_next_to_it(tmp_path, name):
    folder = tmp_path / "draft"
    publish(folder, shards=2)
    first = folder / "model-00001-of-00002.safetensors"
    (folder / "sub").mkdir()
    for place in (tmp_path, folder / "sub"):
        (place / "x.safetensors").write_bytes(first.read_bytes())
    map_all_to(folder, str(tmp_path / "x.safetensors") if name == "/x.safetensors" else name)
    message = error_of(folder)
    assert f"{INDEX} is not a valid index: it may only name files in its own folder" in message
    assert any("is not a valid index" in problem for problem in inspect_draft(folder).problems)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": 3}', "{"])
def test_an_index_that_is_none(tmp_path, text):
    publish(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(text)
    message = error_of(tmp_path)
    assert f"{INDEX} is not a valid index" in message or "not valid JSON" in message


def test_a_tensor_in_two_shards_is_rejected(tmp_path):
    from safetensors.torch import load_file, save_file

    publish(tmp_path, shards=2)
    one, two = (tmp_path / f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2))
    name, tensor = next(iter(load_file(one).items()))
    save_file({**load_file(two), name: torch.zeros_like(tensor)}, two)
    message = error_of(tmp_path)
    assert "1 tensor is in more than one file, and only one can be meant" in message
    assert f"{name} ({one.name} and {two.name})" in message


def test_a_tensor_listed_twice_is_rejected(tmp_path):
    publish(tmp_path, shards=2)
    index = (tmp_path / INDEX).read_text()
    listed = '"weight_map": {'
    assert listed in index
    twice = index.replace(listed, listed + '"fc.weight": "model-00002-of-00002.safetensors", ')
    (tmp_path / INDEX).write_text(twice)
    assert f"{INDEX} lists fc.weight more than once" in error_of(tmp_path)


# --- names -----------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_not_called_a_repository_without_config(monkeypatch):
    def not_cached(*_, **__):
        raise LocalEntryNotFoundError("outgoing traffic has been disabled")

    monkeypatch.setattr(checkpoint, "hf_hub_download", not_cached)
    message = error_of("nobody/nothing")
    assert message.startswith("nobody/nothing is neither a local folder nor a reachable Hub repository: outgoing")
    assert "no config.json" not in message
    assert inspect_draft("nobody/nothing").problems == [message]
    assert not is_draft_checkpoint("nobody/nothing")


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_are_not_cached_while_the_hub_is_unreachable(tmp_path, monkeypatch, shards):
    publish(tmp_path, shards=shards)
    for path in tmp_path.glob("model*.safetensors"):
        path.unlink()

    def cached(_repo, filename, **_):
        if not (tmp_path / filename).is_file():
            raise LocalEntryNotFoundError("outgoing traffic has been disabled")
        return str(tmp_path / filename)

    def no_list(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(checkpoint, "hf_hub_download", cached)
    monkeypatch.setattr(checkpoint, "list_repo_files", no_list)
    message = error_of("some/draft")
    assert "the Hub is not reachable: outgoing traffic has been disabled" in message
    assert "is missing" not in message
    if shards == 1:
        # The configuration alone can be inspected.
        assert inspect_draft("some/draft").problems == []


@pytest.mark.parametrize("name", ["", "x" * 1000, "a\0b", "a/b/c/d", "../..", "~"])
def test_a_name_that_can_be_no_checkpoint(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = error_of(name)
    assert "found an empty name" in message or "neither a local folder" in message or "no config.json" in message


@pytest.mark.parametrize("thing", [None, 5, ["a"], b"a", torch.nn.Linear(1, 1)], ids=lambda thing: type(thing).__name__)
def test_a_draft_is_loaded_by_name(thing):
    message = error_of(thing)
    assert f"found a {type(thing).__name__}" in message and "weight" not in message


def test_a_model_in_place_of_a_name():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    for model in (target, tiny_draft()):
        message = error_of(model)
        assert f"found a {type(model).__name__}" in message and "goes to `generate`" in message


# --- swapped ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def target_folder(tmp_path):
    sizes = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=5).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("layout", PUBLISHED)
def test_target_and_draft_swapped(tmp_path, target_folder, layout):
    from hf_dflash.pair import load_target

    draft = tmp_path / "draft"
    publish(draft, layout)
    assert "It looks like a target: if target and draft were swapped" in error_of(target_folder)
    problems = inspect_draft(target_folder, draft).problems
    assert len(problems) == 2
    assert problems[0] == (
        f"{draft} is given as the target, but it is a DFlash draft. Check whether target and draft are swapped."
    )
    assert "looks like a target" in problems[1]
    with pytest.raises(DFlashError, match="swapped"):
        load_target(str(draft))
