"""What all commands of `hf-dflash` share: help, version, errors, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dflash.draft.errors import PairingError
from hf_dflash.version import __version__
from hf_dflash_cli import app as app_module

ROOT = Path(__file__).parent.parent
COMMANDS = ["demo", "generate", "chat", "bench", "inspect", "export", "data", "train"]


@pytest.fixture
def failing(monkeypatch):
    """Make the whole application raise what the test gives."""

    def fail_with(error: BaseException) -> None:
        def app(*_, **__):
            raise error

        monkeypatch.setattr(app_module, "app", app)

    return fail_with


def test_help_names_every_command(run_cli):
    ended = run_cli("--help")
    assert ended.code == 0
    assert [name for name in COMMANDS if name not in ended.out] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run_cli, command):
    ended = run_cli(command, "--help")
    assert ended.code == 0
    assert command in ended.out


def test_the_overview_has_the_first_line_of_every_commands_help():
    commands = {name: app_module.load(name) for name in app_module.COMMANDS}
    assert {name: command.help.split("\n")[0] for name, command in commands.items()} == app_module.COMMANDS
    assert list(commands) == COMMANDS


WITHOUT_TORCH = """
import sys
from hf_dflash_cli.app import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "hf_dflash") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "completing", "expected"),
    [
        (["--help"], None, "generate"),
        (["--version"], None, __version__),
        (["generate", "--help"], None, "--repetition-penalty"),
        (["chat", "--help"], None, "--block-size"),
        (["bench", "--help"], None, "--gpu-check"),
        (["data", "--help"], None, "--max-prompt-tokens"),
        (["demo", "--help"], None, "--prompt"),
        (["inspect", "--help"], None, "--revision"),
        (["export", "--help"], None, "--max-shard-size"),
        ([], "hf-dflash ge", "generate"),
        ([], "hf-dflash generate --rep", "--repetition-penalty"),
    ],
)
def test_help_version_and_completion_import_no_torch(arguments, completing, expected):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if completing:
        words = str(len(completing.split()) - 1)
        environment |= {"_HF_DFLASH_COMPLETE": "complete_bash", "COMP_WORDS": completing, "COMP_CWORD": words}
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert expected in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_version(run_cli):
    assert run_cli("--version")[:2] == (0, f"hf-dflash {__version__}\n")


def test_no_command_shows_the_help(run_cli):
    ended = run_cli()
    assert "generate" in ended.out + ended.err


def test_an_own_error_is_one_line(run_cli, failing):
    failing(PairingError("Draft a and target b\ndo not pair."))
    assert run_cli("inspect") == (1, "", "hf-dflash: Draft a and target b do not pair.\n")


def test_any_other_error_is_named_in_one_line(run_cli, failing):
    failing(OSError("no such model"))
    assert run_cli("inspect") == (1, "", "hf-dflash: OSError: no such model (use --debug for the traceback)\n")


def test_debug_shows_the_traceback(monkeypatch, failing):
    failing(OSError("no such model"))
    monkeypatch.setattr(sys, "argv", ["hf-dflash", "inspect", "x", "--debug"])
    with pytest.raises(OSError, match="no such model"):
        app_module.main()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "--debug", "hi"], (["generate", "hi"], True)),
        (["--debug", "generate"], (["generate"], True)),
        (["generate", "hi"], (["generate", "hi"], False)),
        (["generate", "--", "--debug"], (["generate", "--", "--debug"], False)),
    ],
)
def test_debug_is_an_option_anywhere_but_after_a_double_dash(arguments, expected):
    assert app_module._without_debug(arguments) == expected


def test_ctrl_c_is_quiet(run_cli, failing):
    failing(KeyboardInterrupt())
    assert run_cli("chat") == (130, "", "")


def test_wrong_usage_ends_with_2(run_cli):
    ended = run_cli("generate", "--no-such-option")
    assert ended.code == 2
    assert "no-such-option" in ended.err


def test_a_missing_model_is_one_line_without_traceback(run_cli, tmp_path):
    ended = run_cli("inspect", tmp_path / "nowhere")
    assert ended.code == 1
    assert "Traceback" not in ended.out + ended.err


def test_python_m_is_the_same_command():
    command = [sys.executable, "-m", "hf_dflash", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"hf-dflash {__version__}\n")
