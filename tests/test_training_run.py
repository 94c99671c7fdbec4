"""Whole training runs on a tiny target: checkpoints, resuming, Ctrl-C, layouts, the command line."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import TrainerCallback

import hf_dflash.training.run as run_module
import hf_dflash.training.trainer as trainer_module
from hf_dflash.draft.errors import CheckpointError, TrainingError, UnsupportedTargetError
from hf_dflash.draft.layouts import to_canonical
from hf_dflash.draft.loading import load_draft
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training import TrainingSettings, save_draft, train
from hf_dflash.training.folder import last_complete_checkpoint
from hf_dflash.training.published import speculators_config, zlab_config
from hf_dflash.training.setup_draft import make_config
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


@pytest.fixture
def ctrl_c_works():
    """Python's own handler, also where the tests were started with SIGINT ignored (a shell's background job)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("failure", [None, RuntimeError, OSError, KeyboardInterrupt])
def test_the_ctrl_c_handler_is_restored_however_training_ends(target, tmp_path, failure, ctrl_c_works):
    write_records(tmp_path / "data.jsonl")
    before = signal.getsignal(signal.SIGINT)

    class Failing(trainer_module.CompleteCheckpoints):
        def on_step_end(self, args, state, control, **kwargs):
            assert signal.getsignal(signal.SIGINT) is not before
            if failure is not None:
                raise failure("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "CompleteCheckpoints", Failing)
        if failure is None:
            run(tiny_settings(tmp_path, max_steps=1), target)
        else:
            with pytest.raises((failure, TrainingError), match="CUDA out of memory"):
                run(tiny_settings(tmp_path), target)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_run_without_matplotlib_has_all_but_the_picture(target, tmp_path, monkeypatch):
    write_records(tmp_path / "data.jsonl")
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "run"
    for resume in (False, True):
        result, messages = run(tiny_settings(tmp_path), target, resume=resume)
        assert result.draft_folder == out / "draft" and load_draft(out / "draft").config.block_size == 4
        assert json.loads((out / "report.json").read_text())["steps"] == result.steps == 4
        assert torch.equal(weights(out / "checkpoint-4")["fc.weight"].bfloat16(), weights(out / "draft")["fc.weight"])
        assert "No training.png was drawn" in messages[-1] and "pip install matplotlib" in messages[-1]
    monkeypatch.undo()
    run(tiny_settings(tmp_path), target, resume=True)
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("step", ["measure_acceptance", "_real_tau", "plot_run"])
def test_the_draft_is_saved_before_anything_that_can_fail_after_training(target, tmp_path, monkeypatch, step):
    write_records(tmp_path / "data.jsonl")

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run_module, step, fail)
    try:
        run(tiny_settings(tmp_path, max_steps=1), target)
    except RuntimeError:
        assert step != "plot_run"
    assert load_draft(tmp_path / "run" / "draft").config.block_size == 4


def test_a_target_that_generate_refuses_still_gets_its_report(target, tmp_path, monkeypatch):
    write_records(tmp_path / "data.jsonl")

    def refuse(*args, **kwargs):
        raise UnsupportedTargetError("its layers cannot be rolled back")

    monkeypatch.setattr(run_module, "_real_tau", refuse)
    result, messages = run(tiny_settings(tmp_path, max_steps=1), target)
    assert result.real_tau is None and result.held_out.tau >= 1
    assert any("was not measured: its layers cannot be rolled back" in line for line in messages)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["held_out_tau"] >= 1


def test_what_a_layout_cannot_express_is_refused_before_training(target, tmp_path):
    """The draft to start from has causal full attention, for which speculators has no key."""
    write_records(tmp_path / "data.jsonl")
    draft = make_config(Target(target), tiny_settings(tmp_path), 95)
    draft.layer_causal = [True]
    save_draft(DFlashDraftModel(draft), tmp_path / "causal")
    with pytest.raises(TrainingError, match="no key for causal full-attention"):
        run(tiny_settings(tmp_path, warm_start=str(tmp_path / "causal"), layout="speculators"), target)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_load_is_not_taken_for_none(target, tmp_path):
    """A folder without a tokenizer is fine: training runs on token ids."""
    write_records(tmp_path / "data.jsonl")
    target.save_pretrained(tmp_path / "target")
    settings = tiny_settings(tmp_path, target=str(tmp_path / "target"), max_steps=1, final_prompts=0)
    assert train(settings, log=lambda line: None).steps == 1
    (tmp_path / "target" / "tokenizer.json").write_text("{broken")
    (tmp_path / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(TrainingError, match="the tokenizer of .* cannot be loaded"):
        train(replace(settings, out=str(tmp_path / "second")), log=lambda line: None)
    assert not (tmp_path / "second").exists()


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
    """Trained on one periodic text, the draft learns it; chance would accept 1 of 96 candidates."""
    ids = [2 + n % 7 for n in range(50)]
    starts = range(5, 25)  # different prompts, since a held-out prompt is never trained on
    lines = [json.dumps({"prompt_ids": ids[:at], "response_ids": ids[at : at + 25]}) for at in starts]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    settings = tiny_settings(
        tmp_path,
        max_steps=150,
        learning_rate=5e-3,
        evaluate_every=150,
        save_every=150,
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


def test_saving_replaces_nothing_of_others(tmp_path):
    """Neither what is in the folder nor its neighbors with names like temporary ones."""
    draft = DFlashDraftModel(tiny_config())
    kept = {"d/thesis.tex": "years of work", "d/data/a.csv": "1,2", "d.old/backup.tex": "b", "d.part/backup.tex": "c"}
    for name, text in kept.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(TrainingError, match=r"did not verifiably write \(.*thesis.tex"):
        save_draft(draft, tmp_path / "d")
    save_draft(draft, tmp_path / "e", "zlab")
    (tmp_path / "e" / "config.json").write_text("{}")
    with pytest.raises(TrainingError, match="config.json"):
        save_draft(draft, tmp_path / "e", "zlab")
    with pytest.raises(TrainingError, match="plain name"):
        save_draft(draft, tmp_path / "f", extra={"../d/thesis.tex": "gone"})
    with pytest.raises(TrainingError, match="layout must be one of canonical, zlab, speculators; found 'z-lab'"):
        save_draft(draft, tmp_path / "f", "z-lab")
    (tmp_path / "g").write_text("a file")
    with pytest.raises(TrainingError, match="did not verifiably write"):
        save_draft(draft, tmp_path / "g")
    assert {name: (tmp_path / name).read_text() for name in kept} == kept
    assert {path.name for path in tmp_path.iterdir()} == {"d", "d.old", "d.part", "e", "g"}


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "d").symlink_to(tmp_path / "disk", target_is_directory=True)
    for _ in range(2):
        save_draft(DFlashDraftModel(tiny_config()), tmp_path / "d")
    assert (tmp_path / "d").is_symlink() and load_draft(tmp_path / "disk").config.block_size == 8
    assert {path.name for path in tmp_path.iterdir()} == {"d", "disk"}


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
