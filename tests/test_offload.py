"""Offloaded targets: weights on disk or in CPU memory, and on the meta device until they are called."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from families import FAMILIES
from lossless import both, prompt
from oracle import randomly
from tiny_drafts import tiny_draft
from transformers import AutoModelForCausalLM

from hf_dflash import UnsupportedOptionError

OPTIONS = {"max_new_tokens": 24, "do_sample": False}
MAPS = {
    "all on disk": {"": "disk"},
    "embedding in memory, head on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.layers.3": "disk",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "embedding on disk, head in memory": {
        "model.embed_tokens": "disk",
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.layers.2": "disk",
        "model.layers.3": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
}


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "tied"])
def checkpoint(request, tmp_path_factory):
    """A target's folder and its plain greedy text."""
    folder = tmp_path_factory.mktemp(request.param)
    target = FAMILIES["qwen3" if request.param == "tied" else request.param].build(0)
    if request.param == "tied":
        target.config.tie_word_embeddings = True
        target.lm_head.weight = target.model.embed_tokens.weight
    target.save_pretrained(folder)
    return folder, target.generate(prompt(), **OPTIONS)


def assert_same_text(target, text: torch.LongTensor) -> None:
    pair = both(target, {"inputs": prompt()}, randomly(4, 5), **OPTIONS)
    assert pair.ours.tolist() == pair.plain.tolist() == text.tolist()


@pytest.mark.parametrize("placement", MAPS)
def test_a_device_map(checkpoint, placement, tmp_path):
    folder, text = checkpoint
    device_map = dict(MAPS[placement])
    if folder.name.startswith("tied") and "lm_head" in device_map:
        device_map["lm_head"] = device_map["model.embed_tokens"]  # a tied weight has only one device
    target = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path)
    assert "meta" in {parameter.device.type for parameter in target.parameters()}
    assert_same_text(target, text)


def test_an_automatic_device_map(checkpoint, tmp_path):
    folder, text = checkpoint
    target = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": 500_000}, offload_folder=tmp_path
    )
    assert set(target.hf_device_map.values()) == {"cpu", "disk"}
    assert_same_text(target, text)


@pytest.mark.parametrize("method", ["cpu", "disk"])
def test_accelerates_own_offload(checkpoint, method, tmp_path):
    folder, text = checkpoint
    target = AutoModelForCausalLM.from_pretrained(folder)
    if method == "cpu":
        cpu_offload(target, execution_device="cpu")
    else:
        disk_offload(target, tmp_path, execution_device="cpu")
    assert {parameter.device.type for parameter in target.parameters()} == {"meta"}
    assert_same_text(target, text)


def test_an_offloaded_draft_is_refused(tmp_path):
    target, draft = FAMILIES["qwen3"].build(0), tiny_draft(vocab_size=384)
    disk_offload(draft, tmp_path, execution_device="cpu")
    with pytest.raises(UnsupportedOptionError, match="offloaded"):
        target.generate(prompt(), assistant_model=draft, **OPTIONS)
