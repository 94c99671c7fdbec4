"""Loading a target and its draft: packages that are missing or outdated, quantized checkpoints, GGUF files, devices."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantized_targets import is_installed
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_dflash import pair as module
from hf_dflash.draft.errors import MissingPackageError, PairingError, PromptError
from hf_dflash.pair import EXTRAS, default_device, encode, load_pair, load_target, placement
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


# --- devices


def found(monkeypatch, *kinds: str) -> None:
    """Let torch find these kinds of accelerator, and no others."""
    for name, backend in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
        monkeypatch.setattr(backend, "is_available", lambda name=name: name in kinds)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [((), "cpu"), (("cuda",), "cuda"), (("xpu",), "xpu"), (("mps",), "mps"), (("mps", "cuda"), "cuda")],
)
def test_the_default_device_is_the_accelerator_if_there_is_one(monkeypatch, kinds, expected):
    found(monkeypatch, *kinds)
    assert default_device() == expected


def test_models_are_loaded_on_the_accelerator_and_the_draft_follows(tiny_folders, monkeypatch):
    """`meta`, a device that every machine has, stands for an accelerator."""
    monkeypatch.setattr(module, "available_accelerators", lambda: ["meta"])
    pair = load_pair(tiny_folders.target, tiny_folders.draft)
    assert (pair.target.device.type, pair.draft.device.type) == ("meta", "meta")
    chosen = load_pair(tiny_folders.target, tiny_folders.draft, device_map="cpu")
    assert (chosen.target.device.type, chosen.draft.device.type) == ("cpu", "cpu")


def test_without_an_accelerator_models_are_on_the_cpu_and_have_no_device_map(tiny_folders, monkeypatch):
    monkeypatch.setattr(module, "available_accelerators", lambda: [])
    pair = load_pair(tiny_folders.target, tiny_folders.draft)
    assert (pair.target.device.type, pair.draft.device.type) == ("cpu", "cpu")
    assert not hasattr(pair.target, "hf_device_map")


@pytest.mark.parametrize(
    ("device_map", "draft", "expected"),
    [
        (None, None, "target on cpu"),
        (None, "cpu", "target and draft on cpu"),
        ({"": torch.device("cuda:0")}, "cuda:0", "target and draft on cuda:0"),
        ({"": "xpu"}, None, "target on xpu"),
        ({"a": 0, "b": 0, "c": "cpu"}, "xpu:0", "target on xpu:0 and cpu, draft on xpu:0"),
    ],
)
def test_where_the_models_are(monkeypatch, device_map, draft, expected):
    monkeypatch.setattr(module, "available_accelerators", lambda: ["xpu"])
    target = SimpleNamespace(device=torch.device("cpu"), hf_device_map=device_map)
    assert placement(target, draft and SimpleNamespace(device=torch.device(draft))) == expected


# --- mistakes that are named


def test_a_draft_given_as_the_target_is_named(tiny_folders):
    with pytest.raises(PairingError, match="is a DFlash draft, not a target.*swapped"):
        load_pair(tiny_folders.draft, tiny_folders.target)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab\udcff", "The prompt: found the byte 0xff at character 3"),
        ([{"role": "user", "content": "\ud800"}], "The user message: found the lone surrogate U\\+D800"),
        ([{"role": "system", "content": "\udc80"}, {"role": "user", "content": "a"}], "The system message: found"),
    ],
)
def test_text_that_no_tokenizer_reads_is_named(tiny_folders, prompt, expected):
    pair = load_pair(tiny_folders.target, tiny_folders.draft, device_map="cpu")
    with pytest.raises(PromptError, match=expected):
        encode(pair, prompt)


@pytest.mark.slow
def test_generate_with_a_gguf_file_of_a_package(run_cli, smollm2):
    """A common local checkpoint, from the command line, its text compared with plain generate's."""
    file = installed_gguf()
    options = ["--gguf-file", file.name, "--dtype", "float32", "--chat", "-n", "24", "--check"]
    ended = run_cli("generate", "-t", file.parent, "-d", smollm2.draft, *options, "Name three colors.")
    assert ended.code == 0, ended.err
    assert "same text as plain generate: yes" in ended.err
