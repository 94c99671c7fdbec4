"""Whole training runs on a tiny target: checkpoints, resuming, Ctrl-C, layouts, the command line."""

import json
import os
import signal

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import TrainerCallback

import hf_dflash.training.trainer as trainer_module
from hf_dflash.draft.errors import CheckpointError, TrainingError
from hf_dflash.draft.layouts import to_canonical
from hf_dflash.draft.loading import load_draft
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.training import TrainingSettings, save_draft, train
from hf_dflash.training.published import speculators_config, zlab_config
from hf_dflash.training.trainer import last_complete_checkpoint
from tests.tiny_drafts import tiny_config
from tests.tiny_training import tiny_settings, tiny_target, write_records


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def run(settings, target, **options):
    messages = []
    return train(settings, target_model=target, tokenizer=None, log=messages.append, **options), messages


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    """One run of four steps."""
    folder = tmp_path_factory.mktemp("finished")
    write_records(folder / "data.jsonl")
    settings = tiny_settings(folder)
    result, messages = run(settings, target)
    return settings, result, messages, folder


def test_a_run_leaves_a_draft_and_its_report(finished):
    settings, result, messages, folder = finished
    out = folder / "run"
    assert result.steps == 4 and result.draft_folder == out / "draft" and not result.interrupted
    draft = load_draft(out / "draft")
    assert draft.dtype == torch.bfloat16 and draft.config.target_layer_ids == [1, 3]
    assert TrainingSettings.from_yaml(out / "training.yaml") == settings
    report = json.loads((out / "report.json").read_text())
    assert report["held_out_tau"] >= 1 and report["real_tau"] >= 1
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((out / "held_out.json").read_text())["held_out"]) == 2
    assert any("22 training records, 2 held out" in line for line in messages)
    assert any("mask token 95" in line for line in messages)


def test_every_checkpoint_is_a_draft(finished):
    out = finished[3] / "run"
    checkpoints = sorted(out.glob("checkpoint-*"))
    assert [folder.name for folder in checkpoints] == ["checkpoint-2", "checkpoint-4"]
    for folder in checkpoints:
        assert load_draft(folder, dtype=torch.float32).config.block_size == 4
        assert (folder / "complete").exists()
    log = json.loads((checkpoints[1] / "trainer_state.json").read_text())["log_history"]
    assert {"loss", "tau_of_blocks", "cross_entropy"} <= set(log[0])
    assert {"eval_tau", "eval_accepted_1", "eval_accepted_3"} <= set().union(*log)


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes", [{}, {"version": 2, "states": "cached", "distillation": 0.5, "loss_vocabulary": 20}], ids=str
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(target, tmp_path, changes):
    """Stopped by Ctrl-C after step 2 and resumed, the weights after step 4 equal those of an uninterrupted run."""
    write_records(tmp_path / "data.jsonl")
    whole = tiny_settings(tmp_path, out=str(tmp_path / "whole"), **changes)
    run(whole, target)
    pieces = tiny_settings(tmp_path, out=str(tmp_path / "pieces"), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "StopOnInterrupt", interrupt_at(2))
        result, messages = run(pieces, target)
    assert result.interrupted and result.steps == 2 and result.draft_folder is None
    assert "Continue with --resume" in messages[-1]
    result, _ = run(pieces, target, resume=True)
    assert result.steps == 4
    expected, found = weights(tmp_path / "whole/checkpoint-4"), weights(tmp_path / "pieces/checkpoint-4")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    earlier = weights(tmp_path / "whole/checkpoint-2")
    assert any(not torch.equal(expected[name], earlier[name]) for name in expected)


def interrupt_at(step):
    """StopOnInterrupt with a real Ctrl-C sent to this process during a step."""

    class Interrupted(trainer_module.StopOnInterrupt):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step - 1:
                os.kill(os.getpid(), signal.SIGINT)

    return Interrupted


def test_the_ctrl_c_handler_is_restored(target, tmp_path):
    write_records(tmp_path / "data.jsonl")
    before = signal.getsignal(signal.SIGINT)
    run(tiny_settings(tmp_path, max_steps=1), target)
    assert signal.getsignal(signal.SIGINT) is before


def test_half_written_checkpoints_are_not_resumed_from(tmp_path):
    for step, complete in ((2, True), (4, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}" / "complete").touch()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert not (tmp_path / "checkpoint-4").exists()
    assert last_complete_checkpoint(tmp_path / "nowhere") is None


def test_a_wrong_folder_is_rejected_before_anything_is_written(finished, target, tmp_path):
    settings, _, _, folder = finished
    with pytest.raises(TrainingError, match="already holds checkpoints"):
        run(settings, target)
    with pytest.raises(TrainingError, match=r"learning_rate 0.0006 \(now 0.1\)"):
        run(tiny_settings(folder, learning_rate=0.1), target, resume=True)
    write_records(tmp_path / "data.jsonl")
    with pytest.raises(TrainingError, match="no complete checkpoint"):
        run(tiny_settings(tmp_path), target, resume=True)
    with pytest.raises(TrainingError, match="lower `held_out`"):
        run(tiny_settings(tmp_path, held_out=24), target)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_during_a_run_leaves_the_last_checkpoint(target, tmp_path):
    write_records(tmp_path / "data.jsonl")

    class Full(trainer_module.CompleteCheckpoints):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise OSError(28, "No space left on device")
            super().on_save(args, state, control, **kwargs)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TrainingError, match="stopped at step 4: .*No space left"),
    ):
        patch.setattr(trainer_module, "CompleteCheckpoints", Full)
        run(tiny_settings(tmp_path), target)
    assert last_complete_checkpoint(tmp_path / "run").name == "checkpoint-2"


def test_a_warm_start_continues_from_the_draft(finished, target, tmp_path):
    write_records(tmp_path / "data.jsonl")
    _, messages = run(
        tiny_settings(tmp_path, warm_start=str(finished[1].draft_folder), max_steps=1, learning_rate=0.0), target
    )
    assert any("Starting from" in line for line in messages)
    before, after = weights(finished[1].draft_folder), weights(tmp_path / "run/draft")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_learns(target, tmp_path):
    """Trained on one repeated text, the draft learns it; chance would accept 1 of 96 candidates."""
    ids = [2 + n % 7 for n in range(30)]
    line = json.dumps({"prompt_ids": ids[:5], "response_ids": ids[5:]}) + "\n"
    (tmp_path / "data.jsonl").write_text(line * 8)
    settings = tiny_settings(
        tmp_path,
        max_steps=60,
        learning_rate=5e-3,
        evaluate_every=60,
        save_every=60,
        anchors=8,
        final_prompts=0,
        held_out=1,
    )
    result, _ = run(settings, target)
    assert result.held_out.tau > 3


NETWORKS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention"] * 2},
    "bidirectional": {"layer_types": ["sliding_attention"] * 2, "layer_causal": [False] * 2},
    "scaled": {"output_multiplier": 0.5, "input_embedding_scale": 2.0, "final_logit_softcapping": 30.0},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e5,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "version 2": {"version": 2, "layer_types": ["sliding_attention"] * 2, "layer_causal": [False] * 2},
}
TARGET_FACTS = {"target_name_or_path": "tiny", "target_hidden_size": 64, "target_num_hidden_layers": 6}
CARRIED = [
    "dflash_version",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "layer_types",
    "layer_causal",
    "sliding_window",
    "output_multiplier",
    "input_embedding_scale",
    "final_logit_softcapping",
    "selector_rank",
    "selector_top_k",
    "conv_kernel_size",
    "conv_group_size",
]


@pytest.mark.parametrize("layout", ["canonical", "zlab", "speculators"])
@pytest.mark.parametrize("network", NETWORKS)
def test_published_layouts_read_back_as_the_same_draft(tmp_path, layout, network):
    torch.manual_seed(0)
    draft = DFlashDraftModel(tiny_config(**NETWORKS[network], **TARGET_FACTS)).eval()
    again = load_draft(save_draft(draft, tmp_path / "d", layout), dtype=torch.float32).eval()
    assert [getattr(again.config, key) for key in CARRIED] == [getattr(draft.config, key) for key in CARRIED]
    block, taps = torch.randn(1, 4, 64), torch.randn(1, 9, 128)
    torch.testing.assert_close(again(block, taps).last_hidden_state, draft(block, taps).last_hidden_state)


def test_each_layout_is_recognized_as_itself(tmp_path):
    config = tiny_config(**TARGET_FACTS)
    assert to_canonical(zlab_config(config, "bfloat16")).source_layout.startswith("z-lab")
    assert to_canonical(speculators_config(config, "bfloat16")).source_layout == "speculators"
    assert speculators_config(config, "bfloat16")["aux_hidden_state_layer_ids"] == [1, 3]


def test_what_a_layout_cannot_express_is_an_error():
    causal = tiny_config(layer_causal=[True, True])
    with pytest.raises(TrainingError, match="no key for causal full-attention"):
        speculators_config(causal, "bfloat16")
    assert zlab_config(causal, "bfloat16")["is_causal"] is True
    with pytest.raises(TrainingError, match="one causality for all layers"):
        zlab_config(tiny_config(layer_causal=[True, False]), "bfloat16")


@pytest.mark.parametrize("network", ["full", "sliding", "bidirectional", "version 2"])
def test_the_authors_package_runs_the_zlab_layout(tmp_path, network):
    authors = pytest.importorskip("dflash.model")
    torch.manual_seed(0)
    draft = DFlashDraftModel(tiny_config(**NETWORKS[network], **TARGET_FACTS)).eval()
    folder = save_draft(draft, tmp_path / "d", "zlab")
    kind = authors.DFlash2DraftModel if draft.config.dflash_version == 2 else authors.DFlashDraftModel
    theirs = kind.from_pretrained(folder, dtype=torch.float32).eval()
    block, taps = torch.randn(1, 4, 64), torch.randn(1, 9, 128)
    found = theirs(target_hidden=taps, noise_embedding=block, position_ids=torch.arange(13)[None])
    torch.testing.assert_close(found, draft(block, taps).last_hidden_state, rtol=1e-5, atol=1e-5)


def test_saving_is_atomic(tmp_path, monkeypatch):
    draft = DFlashDraftModel(tiny_config())
    save_draft(draft, tmp_path / "d", extra={"note.txt": "first"})

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(DFlashDraftModel, "save_pretrained", full)
    with pytest.raises(TrainingError, match="No space left"):
        save_draft(draft, tmp_path / "d", extra={"note.txt": "second"})
    assert (tmp_path / "d" / "note.txt").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]
    monkeypatch.undo()
    save_draft(draft, tmp_path / "d", extra={"note.txt": "third"})
    assert (tmp_path / "d" / "note.txt").read_text() == "third"
    with pytest.raises(CheckpointError):
        load_draft(tmp_path / "nothing")


def test_callbacks_are_transformers_own():
    assert issubclass(trainer_module.StopOnInterrupt, TrainerCallback)
    assert issubclass(trainer_module.CompleteCheckpoints, TrainerCallback)


def command_line(*arguments):
    from typer.testing import CliRunner

    from hf_dflash_cli.data import data
    from hf_dflash_cli.train import train as train_command

    app = typer.Typer()
    app.command()(data)
    app.command()(train_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_line_from_prompts_to_a_draft(target, tmp_path):
    """Flags override the YAML file, and the YAML file overrides the defaults."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(96)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", pad_token="w1").save_pretrained(tmp_path / "t")
    target.save_pretrained(tmp_path / "t")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1} w{n * 3}"}) + "\n" for n in range(3, 23)))
    asked = command_line(
        "data", "--target", tmp_path / "t", "--prompts", prompts, "--out", tmp_path / "data.jsonl", "-n", 12
    )
    assert asked.exit_code == 0, asked.output
    assert len((tmp_path / "data.jsonl").read_text().splitlines()) == 20

    tiny_settings(tmp_path, target=str(tmp_path / "t"), batch_size=1, num_taps=3).to_yaml(tmp_path / "s.yaml")
    trained = command_line("train", "-c", tmp_path / "s.yaml", "--max-steps", 2, "--taps", "0,4", "--layout", "zlab")
    assert trained.exit_code == 0, trained.output
    used = TrainingSettings.from_yaml(tmp_path / "run/training.yaml")
    assert (used.max_steps, used.taps, used.batch_size, used.num_taps) == (2, [0, 4], 1, 3)
    assert json.loads((tmp_path / "run/draft/config.json").read_text())["dflash_config"]["target_layer_ids"] == [0, 4]
    wrong = command_line("train", "--taps", "a,b")
    assert wrong.exit_code == 2 and "layer numbers" in wrong.output
