"""Exporting drafts and using the exported folder, in a process with only transformers and in one with hf_dflash.

Own embeddings and an own reduced head survive the round trip from their published layouts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from tiny_drafts import tiny_draft
from torch import nn
from typer.testing import CliRunner

import hf_dflash
from hf_dflash.draft import hub
from hf_dflash.draft.errors import CheckpointError
from hf_dflash.draft.hub import export_draft, model_card
from hf_dflash.draft.loading import load_draft
from hf_dflash.ownership import RECEIPT
from hf_dflash_cli.app import app

REPOSITORY = Path(__file__).parent.parent
HUB_FILES = {"configuration_dflash.py", "errors.py", "masking_dflash.py", "modeling_dflash.py"}
HIDDEN, VOCABULARY, BLOCK = 64, 128, 8


# ---- published checkpoints to export ----


def published_config(layout: str, draft: hf_dflash.DFlashDraftModel) -> dict:
    """Return the `config.json` of a tiny draft in a published layout."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    network = {name: getattr(draft.config, name) for name in names} | {"model_type": "qwen3"}
    block = {"block_size": BLOCK, "mask_token_id": VOCABULARY - 1}
    nested = {**block, "target_layer_ids": list(draft.config.target_layer_ids)}
    if layout == "speculators":
        return {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "transformer_layer_config": network,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in draft.config.target_layer_ids],
            "draft_vocab_size": draft.config.draft_vocab_size,
            "speculators_config": {"verifier": {"name_or_path": "org/verifier"}},
            **block,
        }
    if layout == "z-lab 2":
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
        return {**network, "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": nested}
    if layout == "modelopt":
        nested |= {"causal": False}
    return {**network, "architectures": ["DFlashDraftModel"], "dflash_config": nested}


DRAFTS = {
    "z-lab": {},
    "z-lab 2": {"version": 2},
    "modelopt": {"own_embeddings": True},
    "speculators": {"draft_vocab_size": 32},
}


def publish(layout: str, folder: Path) -> Path:
    """Write a tiny draft in a published layout."""
    draft = tiny_draft(**DRAFTS[layout])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published_config(layout, draft)))
    save_file({name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, folder / "model.safetensors")
    return folder


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@torch.no_grad()
def candidates(draft: hf_dflash.DFlashDraftModel) -> list[list[int]]:
    """Return what a draft proposes on four rows of fixed random taps, with its own embeddings and head if any."""
    generator = torch.Generator().manual_seed(5)
    embedding, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    for module in (embedding, head):
        module.weight.normal_(generator=generator)
    block = torch.full((4, BLOCK), VOCABULARY - 1)
    block[:, 0] = anchors = torch.tensor([7, 8, 9, 10])
    taps = torch.randn(4, 11, draft.config.context_size, generator=generator)
    hidden = draft(noise_embeds=draft.embed(block, embedding), context_hidden_states=taps).last_hidden_state
    return draft.propose(hidden[:, 1:], anchors, head).tolist()


# ---- writing ----


@pytest.mark.parametrize("layout", DRAFTS)
def test_an_exported_draft_equals_its_source(tmp_path, layout: str):
    source = publish(layout, tmp_path / "source")
    folder = export_draft(source, tmp_path / "out" / "draft", target="org/target")
    exported, original = load_draft(folder), load_draft(source)
    assert type(exported) is type(original)
    assert exported.state_dict().keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    assert candidates(exported) == candidates(original)
    assert len({token for row in candidates(original) for token in row}) > 3


def test_own_embeddings_and_heads_affect_the_candidates(tmp_path):
    """Guards the comparison above: other embeddings or another head would change the candidates."""
    for layout, module in (("modelopt", "embed_tokens"), ("speculators", "lm_head")):
        draft = load_draft(publish(layout, tmp_path / layout))
        before = candidates(draft)
        with torch.no_grad():
            getattr(draft, module).weight.mul_(-1)
        assert candidates(draft) != before


def test_an_exported_folder_is_complete(tmp_path):
    folder = export_draft(publish("z-lab", tmp_path / "source"), tmp_path / "draft", target="org/target")
    others = {"README.md", "config.json", "model.safetensors", RECEIPT}
    custom = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert contents(folder) == HUB_FILES | others | custom
    for name in HUB_FILES:
        assert (folder / name).read_bytes() == (REPOSITORY / "hf_dflash" / "draft" / name).read_bytes()
    assert (folder / "custom_generate/requirements.txt").read_text().split() == ["hf-dflash"]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "dflash" and config["architectures"] == ["DFlashDraftModel"]
    assert config["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
    # transformers' own loop reads these at top level.
    assert (config["block_size"], config["mask_token_id"], config["target_layer_ids"]) == (8, 127, [0, 2])
    assert config["target_name_or_path"] == "org/target"


def test_the_card_names_the_target_and_claims_nothing_false(tmp_path):
    card = model_card(tiny_draft(target_name_or_path="org/target"))
    metadata = card.split("---")[1].splitlines()
    assert "base_model: org/target" in metadata and "library_name: transformers" in metadata
    assert 'speculation_type="dflash"' in card and "proposes 7 tokens" in card
    # transformers' own loop supports neither a draft's own embeddings, nor its own head, nor a selector.
    for options in ({"version": 2}, {"own_embeddings": True}, {"draft_vocab_size": 32}):
        card = model_card(tiny_draft(**options))
        assert "base_model" not in card and "speculation_type" not in card


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/private/my-target",
        "/home/me/private/my-target/",
        "./private/my-target",
        "../private/my-target",
        "~/private/my-target",
        "C:\\private\\my-target",
        "private\\my-target",
        "nested/private/my-target",
        "my private/my-target",
    ],
)
def test_the_card_keeps_a_local_path_to_itself(path: str):
    card = model_card(tiny_draft(target_name_or_path=path))
    assert "base_model" not in card and "private" not in card
    assert "# DFlash draft for my-target\n" in card
    assert 'from_pretrained("<path of my-target>")' in card


def test_an_existing_folder_is_not_a_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draft = tiny_draft(target_name_or_path="org/target")
    assert ModelCard(model_card(draft)).data.base_model == "org/target"
    (tmp_path / "org" / "target").mkdir(parents=True)
    card = model_card(draft)
    assert "base_model" not in card and "org/target" not in card and "# DFlash draft for target\n" in card


@pytest.mark.parametrize("path", [".", "..", "~", "/", "C:\\"])
def test_a_path_without_a_name_leaves_the_target_unnamed(path: str):
    card = model_card(tiny_draft(target_name_or_path=path))
    assert card == model_card(tiny_draft())
    assert "# DFlash draft\n" in card and 'from_pretrained("<its target>")' in card


@pytest.mark.parametrize("name", ["gpt2", "org/target", "org/Target-1.5_b", "123"])
def test_the_metadata_of_a_card_is_valid(name: str):
    card = ModelCard(model_card(tiny_draft(target_name_or_path=name)))
    assert card.data.to_dict() == {
        "base_model": name,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "custom_generate"],
    }
    assert card.text.lstrip().startswith(f"# DFlash draft for {name}\n")
    assert f'AutoTokenizer.from_pretrained("{name}")' in card.text


def test_the_command_asks_for_the_target_of_a_local_path(tmp_path):
    source = publish("z-lab", tmp_path / "source")
    for target, asks in ((str(tmp_path / "target"), True), ("org/target", False)):
        folder = export_draft(source, tmp_path / "first", target=target, force=True)
        result = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "second"), "--force"])
        assert result.exit_code == 0, result.output
        assert ("add --target" in result.output) == asks


def test_a_checkpoint_that_names_its_target_keeps_it(tmp_path):
    folder = export_draft(publish("speculators", tmp_path / "source"), tmp_path / "draft")
    assert "base_model: org/verifier\n" in (folder / "README.md").read_text()


def test_large_drafts_are_written_in_shards(tmp_path):
    source = publish("z-lab", tmp_path / "source")
    folder = export_draft(source, tmp_path / "draft", max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert (folder / "model.safetensors.index.json").exists()
    assert candidates(load_draft(folder)) == candidates(load_draft(source))


def test_a_folder_in_use_is_left_alone(tmp_path):
    source, other = publish("z-lab", tmp_path / "source"), tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not empty.*--force"):
        export_draft(source, other)
    with pytest.raises(CheckpointError, match="does not hold a DFlash draft.*not even with --force"):
        export_draft(source, other, force=True)
    assert contents(other) == {"thesis.txt"}

    draft = export_draft(source, tmp_path / "draft")
    with pytest.raises(CheckpointError, match="not empty"):
        export_draft(source, draft)
    written = (draft / "model.safetensors").stat().st_mtime_ns
    export_draft(source, draft, force=True)
    assert (draft / "model.safetensors").stat().st_mtime_ns > written
    assert {path.name for path in tmp_path.iterdir()} == {"source", "other", "draft"}


@pytest.mark.parametrize("name", ["old.txt", "README.md", "custom_generate/mine.py", RECEIPT])
def test_what_was_added_to_an_export_is_not_replaced_even_with_force(tmp_path, name: str):
    source = publish("z-lab", tmp_path / "source")
    draft = export_draft(source, tmp_path / "draft")
    (draft / name).write_text("years of work")
    with pytest.raises(CheckpointError, match=rf"did not verifiably write \(.*{name}.*not even with --force"):
        export_draft(source, draft, force=True)
    assert (draft / name).read_text() == "years of work"


def test_a_draft_that_others_made_is_not_replaced_even_with_force(tmp_path):
    source, theirs = publish("z-lab", tmp_path / "source"), publish("modelopt", tmp_path / "theirs")
    before = contents(theirs)
    with pytest.raises(CheckpointError, match=r"did not verifiably write \(config.json, model.safetensors\)"):
        export_draft(source, theirs, force=True)
    assert contents(theirs) == before


@pytest.mark.parametrize("there_before", [False, True])
def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch, there_before: bool):
    source, draft = publish("z-lab", tmp_path / "source"), tmp_path / "draft"
    if there_before:
        export_draft(source, draft)

    def fail(_):
        raise OSError("disk full")

    before = {name: (draft / name).stat().st_mtime_ns for name in contents(draft)}
    monkeypatch.setattr(hub, "model_card", fail)
    with pytest.raises(OSError, match="disk full"):
        export_draft(source, draft, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source"} | ({"draft"} if there_before else set())
    assert ({name: (draft / name).stat().st_mtime_ns for name in contents(draft)} if there_before else {}) == before


def test_the_command_exports_and_reports_what_is_missing(tmp_path):
    source = publish("z-lab", tmp_path / "source")
    result = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "draft"), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "does not name its target" in result.output
    assert load_draft(tmp_path / "draft").dtype == torch.bfloat16
    again = ["export", str(source), str(tmp_path / "draft"), "--force", "--target", "org/target"]
    result = CliRunner().invoke(app, again)
    assert result.exit_code == 0 and "does not name" not in result.output


def test_push_to_hub_uploads_what_plain_transformers_needs(tmp_path, monkeypatch):
    """No network: the three calls to the Hub are replaced, everything else is transformers' own."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers.utils import hub as transformers_hub

    uploaded = {}

    def create_repo(*args, **kwargs):
        return huggingface_hub.RepoUrl("https://huggingface.co/org/draft")

    def create_commit(*args, operations, **kwargs):
        uploaded.update(
            {operation.path_in_repo: Path(operation.path_or_fileobj).stat().st_size for operation in operations}
        )

    def no_card_yet(*args, **kwargs):
        raise LocalEntryNotFoundError("README.md")

    monkeypatch.setattr(huggingface_hub.ModelCard, "load", no_card_yet)
    for name, replacement in (("create_repo", create_repo), ("create_commit", create_commit)):
        monkeypatch.setattr(huggingface_hub.HfApi, name, replacement)
        monkeypatch.setattr(transformers_hub, name, replacement, raising=False)
    monkeypatch.chdir(tmp_path)
    tiny_draft().push_to_hub("org/draft")
    assert HUB_FILES | {"config.json", "model.safetensors"} <= uploaded.keys()
    assert all(uploaded.values())


# ---- using ----

TARGET = """
import json, sys, warnings
import torch
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
logging.set_verbosity_error()
torch.set_num_threads(1)
folder = sys.argv[1]
torch.manual_seed(0)
# Weights far larger than usual, so that the text is varied and a wrong rollback is visible.
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
special = dict(eos_token_id=None, bos_token_id=None, pad_token_id=0)
target = LlamaForCausalLM(LlamaConfig(**sizes, **special, initializer_range=0.3)).eval()
ids = torch.randint(128, (1, 9))
options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
plain = target.generate(ids, **options)
facts = {"varied": len(set(plain[0].tolist())) > 15}

def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

WITHOUT_HF_DFLASH = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_dflash":
            raise ModuleNotFoundError("No module named 'hf_dflash'")
import sys
sys.meta_path.insert(0, Absent())
"""

PLAIN_TRANSFORMERS = """
for name in ("first", "second", "sharded"):
    draft = AutoModel.from_pretrained(f"{folder}/{name}", trust_remote_code=True)
    blocks = []
    draft.register_forward_hook(lambda *args: blocks.append(1))
    text = target.generate(ids, **options, assistant_model=draft, speculation_type="dflash")
    facts[name] = {
        "equal": torch.equal(text, plain),
        "blocks": len(blocks),
        "class": type(draft).__name__,
        "package": type(draft).__module__.partition(".")[0],
    }
draft.save_pretrained(f"{folder}/again")
again = AutoModel.from_pretrained(f"{folder}/again", trust_remote_code=True)
facts["again"] = torch.equal(again.fc.weight, draft.fc.weight)
facts["float16"] = error_of(
    lambda: AutoModel.from_pretrained(f"{folder}/first", trust_remote_code=True, dtype=torch.float16)
)
facts["half"] = error_of(draft.half)
facts["custom_generate"] = error_of(
    lambda: target.generate(ids, **options, custom_generate=f"{folder}/first", trust_remote_code=True)
)
print(json.dumps(facts))
"""

CUSTOM_GENERATE = """
# Loaded before hf_dflash is imported and takes precedence: a class from the Hub's copy of the code.
remote = AutoModel.from_pretrained(f"{folder}/first", trust_remote_code=True)
facts["remote"] = type(remote).__module__.partition(".")[0]
seen = []
custom = dict(**options, trust_remote_code=True, stats=seen.append)
for name in ("first", "second"):
    text = target.generate(ids, **custom, custom_generate=f"{folder}/{name}")
    facts[name] = torch.equal(text, plain)
import hf_dflash
from hf_dflash.draft.hub.generate import generate
facts["adopted"] = torch.equal(target.generate(ids, **options, assistant_model=remote, stats=seen.append), plain)
draft = hf_dflash.load_draft(f"{folder}/first")
facts["given"] = torch.equal(generate(target, draft=draft, inputs=ids, **options, stats=seen.append), plain)
by_name = generate(target, draft=f"{folder}/first", inputs=ids, **options, stats=seen.append)
facts["by name"] = torch.equal(by_name, plain)
facts["unknown"] = error_of(lambda: generate(target, inputs=ids, **options))
torch.manual_seed(3)
sampled = target.generate(ids, **{**options, "do_sample": True})
torch.manual_seed(3)
text = target.generate(ids, **{**custom, "do_sample": True}, custom_generate=f"{folder}/first")
facts["sampled"] = torch.equal(text, sampled)
facts["calls"] = len(seen)
facts["rounds"] = min(len(statistics.committed) for statistics in seen)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Three exported drafts, and the metadata of an installed hf-dflash, which transformers checks."""
    folder = tmp_path_factory.mktemp("exported")
    export_draft(publish("z-lab", folder / "z-lab"), folder / "first")
    export_draft(publish("z-lab 2", folder / "z-lab 2"), folder / "second")
    export_draft(folder / "first", folder / "sharded", max_shard_size="50KB")
    metadata = folder / "installed" / f"hf_dflash-{hf_dflash.__version__}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: hf-dflash\nVersion: {hf_dflash.__version__}\n")
    return folder


def run(script: str, folder: Path, *path: Path) -> dict:
    """Run a script in a new process with the given folders on its path, and return the facts that it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_plain_transformers_loads_it_and_its_own_loop_gives_the_same_text(exported):
    facts = run(WITHOUT_HF_DFLASH + TARGET + PLAIN_TRANSFORMERS, exported)
    assert facts["varied"]
    for name, kind in (("first", "DFlashDraftModel"), ("second", "DFlash2DraftModel"), ("sharded", "DFlashDraftModel")):
        assert facts[name]["equal"] and facts[name]["blocks"] > 3, name
        assert (facts[name]["class"], facts[name]["package"]) == (kind, "transformers_modules")
    assert facts["again"], "a copy saved by plain transformers must load there too"
    assert facts["float16"].startswith("DraftDtypeError") and facts["half"].startswith("DraftDtypeError")
    assert "hf-dflash" in facts["custom_generate"] and facts["custom_generate"].startswith("ImportError")


def test_custom_generate_runs_the_loop_of_hf_dflash(exported):
    facts = run(TARGET + CUSTOM_GENERATE, exported, REPOSITORY, exported / "installed")
    assert facts["varied"]
    assert facts["first"] and facts["second"] and facts["sampled"]
    assert facts["given"] and facts["by name"]
    assert facts["remote"] == "transformers_modules" and facts["adopted"]
    assert facts["unknown"].startswith("ValueError: No draft given")
    # Every call but the rejected one went through our loop, and drafted.
    assert facts["calls"] == 6 and facts["rounds"] > 3
