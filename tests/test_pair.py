"""Loading a target: the errors for missing or outdated packages, quantized checkpoints, GGUF files."""

import json
import shutil
from pathlib import Path

import pytest
from quantized_targets import is_installed
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_dflash.draft.errors import MissingPackageError
from hf_dflash.pair import EXTRAS, load_target
from hf_dflash.smollm2 import installed_gguf

#: The `quantization_config` of a checkpoint's config.json, and the package imported to load it.
QUANTIZED = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "gptqmodel"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptqmodel"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "compressed-tensors": ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed_tensors"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "optimum.quanto"),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
        "torchao",
    ),
}


@pytest.fixture
def checkpoint(tiny_folders, tmp_path):
    """Return a function that makes a checkpoint with the given `quantization_config`."""

    def make(entry: dict) -> str:
        folder = Path(shutil.copytree(tiny_folders.target, tmp_path / "target"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
        return str(folder)

    return make


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_missing_package_is_one_line_with_what_to_install(checkpoint, method):
    entry, package = QUANTIZED[method]
    if is_installed(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingPackageError) as refusal:
        load_target(checkpoint(entry))
    assert f'pip install -U "hf-dflash[{EXTRAS[method]}]"' in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "entry, options, expected",
    [
        (QUANTIZED["awq"][0], {}, r"hf-dflash\[awq\]"),
        ({}, {}, "needs widgets>=3"),
        ({}, {"gguf_file": "model.gguf"}, r"hf-dflash\[gguf\]"),
    ],
)
def test_an_outdated_package_is_named(checkpoint, monkeypatch, entry, options, expected):
    def refuse(*args, **options):
        raise ImportError("This checkpoint needs widgets>=3.\nFound 2.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(MissingPackageError, match=expected) as refusal:
        load_target(checkpoint(entry), **options)
    assert "widgets>=3" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.quantized
def test_a_quantized_checkpoint_keeps_its_quantization(tiny_folders, tmp_path):
    """Without a flag: a quantization that was not requested must not override the checkpoint's own."""
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(tiny_folders.target, quantization_config=config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folders.target).save_pretrained(tmp_path)
    target, _ = load_target(str(tmp_path))
    assert target.is_loaded_in_4bit


@pytest.mark.slow
def test_generate_with_a_gguf_file_of_a_package(run_cli, smollm2):
    """A common local checkpoint, from the command line, its text compared with plain generate's."""
    file = installed_gguf()
    options = ["--gguf-file", file.name, "--dtype", "float32", "--chat", "-n", "24", "--check"]
    ended = run_cli("generate", "-t", file.parent, "-d", smollm2.draft, *options, "Name three colors.")
    assert ended.code == 0, ended.err
    assert "same text as plain generate: yes" in ended.err
