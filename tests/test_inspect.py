"""`hf-dflash inspect`: its output for every fixture, for broken checkpoints and for pairs."""

import json
from pathlib import Path

import pytest
from published import PUBLISHED, publish
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_dflash.draft.inspection import inspect_draft
from hf_dflash_cli.app import app

CONFIGS = Path(__file__).parent / "data" / "configs"
VALID = sorted(path.stem for path in CONFIGS.glob("*.json") if not path.stem.startswith("laguna"))


@pytest.fixture
def target(tmp_path):
    """The configuration of a target that matches the tiny drafts; no weights."""
    sizes = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    folder = tmp_path / "target"
    LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=5).save_pretrained(folder)
    return folder


def folder_of(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text((CONFIGS / f"{name}.json").read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


@pytest.mark.parametrize("name", VALID)
def test_every_fixture(tmp_path, name):
    code, output = run(folder_of(name, tmp_path), "--json")
    assert code == 0
    result = json.loads(output)
    raw = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    assert result["problems"] == [] and result["pairs"] is None and result["target"] is None
    assert result["warnings"] == ["The checkpoint has no weights: only the configuration was checked."]
    assert result["draft"]["dflash_version"] == (2 if "dflash2" in name else 1)
    assert result["draft"]["dtype"] == "bfloat16"
    assert result["draft"]["block_size"] == raw.get("block_size", raw.get("dflash_config", {}).get("block_size"))
    assert result["expects"]["hidden_size"] == raw.get("transformer_layer_config", raw)["hidden_size"]
    assert result["expects"]["target_layer_ids"] == result["draft"]["target_layer_ids"]


@pytest.mark.parametrize("layout", PUBLISHED)
def test_every_layout_with_weights(tmp_path, layout):
    draft = publish(tmp_path, layout)
    inspection = inspect_draft(tmp_path)
    assert inspection.problems == [] and inspection.warnings == []
    assert inspection.draft["parameters"] >= sum(weight.numel() for weight in draft.parameters())
    assert inspection.draft["own_embeddings"] == (layout == "modelopt")
    assert "BF16" in inspection.draft["stored_dtypes"]


def test_the_readable_output(tmp_path):
    publish(tmp_path, "z-lab-nested")
    code, output = run(tmp_path)
    assert code == 0
    for words in ("z-lab-nested", "sliding_attention, full_attention", "0, 2", "127", "bfloat16", "No problems found."):
        assert words in output
    assert "None" not in output and "[" not in output


def test_all_problems_of_a_broken_draft_are_listed(tmp_path):
    publish(
        tmp_path,
        edit=lambda raw: (raw.update(block_size=1, rope_theta=None), raw["dflash_config"].pop("mask_token_id")),
    )
    code, output = run(tmp_path, "--json")
    assert code == 1
    problems = json.loads(output)["problems"]
    assert len(problems) == 3
    assert all(any(f"`{key}`" in text for text in problems) for key in ("block_size", "rope_theta", "mask_token_id"))
    code, output = run(tmp_path)
    assert code == 1 and output.count("error:") == 3 and "No problems found" not in output


def test_tensors_are_checked(tmp_path):
    publish(tmp_path, edit_tensors=lambda tensors: tensors.pop("norm.weight"))
    code, output = run(tmp_path)
    assert code == 1 and "1 tensor is missing: norm.weight." in output


def test_corrupted_weights_and_a_broken_configuration_are_both_listed(tmp_path):
    publish(tmp_path, edit=lambda raw: raw.update(block_size=1))
    (tmp_path / "model.safetensors").write_bytes(b"corrupted")
    problems = inspect_draft(tmp_path).problems
    assert any("truncated or corrupted" in text for text in problems)
    assert any("`block_size`" in text for text in problems)


def test_a_model_that_is_not_a_draft_is_a_problem(tmp_path, target):
    assert run(folder_of("laguna-xs-2.1-dflash", tmp_path))[0] == 1
    code, output = run(target)
    assert code == 1 and "This is not a DFlash draft" in output
    code, output = run(tmp_path / "nowhere")
    assert code == 1 and "neither a local folder nor a reachable Hub repository" in output


def test_a_float16_checkpoint_is_a_problem(tmp_path):
    publish(tmp_path, edit=lambda raw: raw.update(torch_dtype="float16"))
    code, output = run(tmp_path)
    assert code == 1 and "outliers" in output


def test_a_matching_pair(tmp_path, target):
    publish(tmp_path)
    code, output = run(tmp_path, "--target", target)
    assert code == 0 and "The draft fits the target." in output
    result = inspect_draft(tmp_path, target).as_dict()
    assert result["pairs"] is True and result["target"]["num_hidden_layers"] == 6
    assert json.loads(json.dumps(result)) == result


def test_a_pair_that_does_not_match(tmp_path, target):
    code, output = run(folder_of("qwen3-8b-dflash-b16", tmp_path), "--target", target)
    assert code == 1 and "The draft does not fit the target." in output
    for numbers in ("size 4096", "size 64", "151936", "one of 128", "36 layers", "has 6"):
        assert numbers in output


def test_a_special_mask_token_of_the_target_is_a_warning(tmp_path, target):
    LlamaConfig(
        hidden_size=64, vocab_size=128, num_hidden_layers=6, num_attention_heads=4, eos_token_id=127
    ).save_pretrained(target)
    publish(tmp_path)
    code, output = run(tmp_path, "--target", target)
    assert code == 0 and "warning:" in output and "`eos_token_id`" in output


def test_an_unreadable_target_is_a_problem(tmp_path):
    publish(tmp_path)
    inspection = inspect_draft(tmp_path, tmp_path / "nowhere")
    assert inspection.pairs is None
    assert "The configuration of the target" in inspection.problems[0]
