"""`import hf_dflash` in a process of its own: silent, repeatable, light, and known to transformers' Auto classes."""

import json
import subprocess
import sys

import pytest

# What transformers' own model, generation and pipeline modules import is allowed, whatever it is in this environment.
SCRIPT = """
import contextlib, io, json, sys

def packages():
    return {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

import torch, transformers
from transformers import AutoConfig, AutoModel, GenerationMixin, PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3
from transformers.pipelines import base
before = packages()

said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    import hf_dflash
rooms = [name for name in sys.modules if name.startswith("hf_dflash.")]
report = {
    "said": said.getvalue(),
    "packages": sorted(packages() - before),
    "rooms": sorted({name.split(".")[1] for name in rooms}),
    "missing": [name for name in hf_dflash.__all__ if not hasattr(hf_dflash, name)],
    "version": hf_dflash.__version__,
}

config = hf_dflash.DFlashConfig(
    dflash_version=1, block_size=4, mask_token_id=5, target_layer_ids=[0, 1], vocab_size=32, hidden_size=16,
    intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    layer_types=["full_attention"], layer_causal=[False],
)
hf_dflash.DFlashDraftModel(config).save_pretrained(sys.argv[1])
report["auto"] = [type(auto.from_pretrained(sys.argv[1])).__name__ for auto in (AutoConfig, AutoModel)]

first = GenerationMixin.generate
for name in ["hf_dflash", *rooms]:
    del sys.modules[name]
import hf_dflash
report["dispatched_once"] = GenerationMixin.generate is first
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("draft")
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_prints_nothing(report):
    assert report["said"] == ""


def test_importing_brings_in_nothing_beyond_torch_and_transformers(report):
    assert report["packages"] == ["hf_dflash"]


def test_the_command_line_and_training_stay_out(report):
    assert not {"cli", "bench", "training", "hub"} & set(report["rooms"])


def test_importing_twice_dispatches_once(report):
    assert report["dispatched_once"]


def test_auto_classes_know_drafts(report):
    assert report["auto"] == ["DFlashConfig", "DFlashDraftModel"]


def test_every_public_name_is_there(report):
    from hf_dflash.version import __version__

    assert report["missing"] == []
    assert report["version"] == __version__
