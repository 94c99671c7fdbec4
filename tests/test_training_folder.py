"""The folder of a training run: what an earlier run verifiably made is replaced, anything else is refused and kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_dflash.draft.errors import TrainingError
from hf_dflash.ownership import record_made
from hf_dflash.training import train
from hf_dflash.training.folder import (
    COMPLETE,
    check_folder,
    claim_checkpoint,
    complete_checkpoint,
    last_complete_checkpoint,
    start_run,
)
from tests.tiny_training import tiny_settings, write_records


def write(folder: Path, files: dict[str, str]) -> dict[str, str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return files


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(errors="ignore")
        for path in folder.rglob("*")
        if path.is_file()
    }


def checkpoint(out: Path, step: int, complete: bool = True, keep: int = 9) -> Path:
    """A checkpoint as a run makes it."""
    folder = out / f"checkpoint-{step}"
    claim_checkpoint(folder)
    (folder / "model.safetensors").write_text(f"weights of step {step}")
    if complete:
        complete_checkpoint(folder, keep)
    return folder


class NeverLoaded:
    """A target that must not be looked at."""

    def __getattr__(self, name):
        raise AssertionError(f"the target was used: {name}")


FOREIGN = {
    "another program's checkpoints": {
        "checkpoint-100/model.safetensors": "weeks of somebody's GPU time",
        "checkpoint-100/trainer_state.json": '{"global_step": 100}',
        "checkpoint-200/model.safetensors": "more weeks",
    },
    "a marker with the same name": {"checkpoint-100/complete": "yes", "checkpoint-100/model.bin": "weeks"},
    "a book": {
        "draft/chapter1.tex": "my draft of a book",
        "training.yaml": "mine: 1",
        "report.json": "{}",
        "held_out.json": "[]",
    },
    "any file": {"notes.txt": "mine"},
    "a hidden file": {".git/config": "[core]"},
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_folder_is_refused_by_name_before_anything_is_loaded(tmp_path, kind, resume):
    write_records(tmp_path / "data.jsonl")
    write(tmp_path / "run", FOREIGN[kind])
    with pytest.raises(TrainingError) as error:
        train(tiny_settings(tmp_path), target_model=NeverLoaded(), resume=resume, log=lambda line: None)
    assert str(tmp_path / "run") in str(error.value)
    if not resume:
        assert "not made by `hf-dflash train`" in str(error.value)
        assert sorted(FOREIGN[kind])[0].split("/")[0] in str(error.value)
    assert contents(tmp_path / "run") == FOREIGN[kind]


@pytest.mark.parametrize(
    "name",
    ["training.yaml", "held_out.json", "report.json", "training.png", "draft/config.json", "checkpoint-7/model.bin"],
)
def test_what_was_put_into_a_folder_of_ours_is_refused_too(tmp_path, name):
    """An earlier run ended before its first checkpoint; then something was edited, or put in its place."""
    out = tmp_path / "run"
    settings = tiny_settings(tmp_path)
    start_run(out, settings)
    write(out, {"held_out.json": "{}"})
    record_made(out, ["held_out.json"])
    assert check_folder(out, settings, resume=False) is None
    write(out, {name: "of somebody else"})
    before = contents(out)
    with pytest.raises(TrainingError, match=name.split("/")[0]):
        check_folder(out, settings, resume=False)
    assert contents(out) == before


def test_other_files_beside_a_run_are_left_alone(tmp_path):
    out, settings = tmp_path / "run", tiny_settings(tmp_path)
    start_run(out, settings)
    write(out, {"notes.txt": "mine"})
    assert check_folder(out, settings, resume=False) is None
    start_run(out, replace(settings, learning_rate=0.5))
    assert (out / "notes.txt").read_text() == "mine" and "learning_rate: 0.5" in (out / "training.yaml").read_text()


@pytest.mark.parametrize("name", ["report.json", "draft/chapter1.tex", "checkpoint-9/model.bin"])
def test_resuming_replaces_nothing_of_others(tmp_path, name):
    out, settings = tmp_path / "run", tiny_settings(tmp_path)
    start_run(out, settings)
    latest = checkpoint(out, 2)
    assert check_folder(out, settings, resume=True) == latest
    write(out, {name: "of somebody else"})
    with pytest.raises(TrainingError, match=f"{name.split('/')[0]}.*no earlier run verifiably made"):
        check_folder(out, settings, resume=True)


def test_a_settings_file_that_was_edited_is_kept_when_resuming(tmp_path):
    out, settings = tmp_path / "run", tiny_settings(tmp_path)
    start_run(out, settings)
    checkpoint(out, 2)
    edited = "# a good one\n" + (out / "training.yaml").read_text()
    write(out, {"training.yaml": edited})
    check_folder(out, settings, resume=True)
    start_run(out, settings)
    assert (out / "training.yaml").read_text() == edited
    with pytest.raises(TrainingError, match=r"training\.yaml"):  # it would have to be replaced
        check_folder(out, replace(settings, save_every=1), resume=True)


def test_half_written_checkpoints_are_not_resumed_from_and_make_way(tmp_path):
    checkpoint(tmp_path, 2)
    half = checkpoint(tmp_path, 4, complete=False)
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert half.exists()  # looking deletes nothing
    checkpoint(tmp_path, 4)
    assert last_complete_checkpoint(tmp_path) == half
    assert last_complete_checkpoint(tmp_path / "nowhere") is None


def test_a_checkpoint_never_replaces_a_foreign_folder(tmp_path):
    theirs = write(tmp_path, {"checkpoint-4/model.safetensors": "weeks"})
    with pytest.raises(TrainingError, match="put there by something else"):
        checkpoint(tmp_path, 4)
    assert contents(tmp_path) == theirs


def test_only_the_latest_own_checkpoints_are_kept(tmp_path):
    write(tmp_path, {"checkpoint-1/model.safetensors": "of somebody else"})
    for step in (2, 4, 6):
        checkpoint(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-4", "checkpoint-6"]
    write(tmp_path, {"checkpoint-4/analysis.txt": "mine"})
    checkpoint(tmp_path, 8, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-4", "checkpoint-8"]
    write(tmp_path, {"checkpoint-8/model.safetensors": "other weights, put there by hand"})
    checkpoint(tmp_path, 10, keep=1)
    assert (tmp_path / "checkpoint-8" / "model.safetensors").read_text().startswith("other weights")


def test_a_run_of_version_0_1_can_be_resumed(tmp_path):
    """It has no receipts, and its marker has no list of files."""
    out, settings = tmp_path / "run", tiny_settings(tmp_path)
    write(out, {f"checkpoint-2/{COMPLETE}": json.dumps({"step": 2}), "held_out.json": "{}"})
    settings.to_yaml(out / "training.yaml")
    assert check_folder(out, settings, resume=True) == out / "checkpoint-2"


@pytest.mark.parametrize("place", ["file", "file/below", "dangling"])
def test_an_output_that_cannot_be_a_folder_is_refused_before_anything_is_loaded(tmp_path, place):
    write_records(tmp_path / "data.jsonl")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TrainingError, match="is not a folder"):
        train(tiny_settings(tmp_path, out=str(tmp_path / place)), target_model=NeverLoaded(), log=lambda line: None)
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "nowhere").exists()
