"""What all commands of `hf-dflash` share: help, version, errors, exit codes."""

import subprocess
import sys

import pytest

from hf_dflash.cli import app as app_module
from hf_dflash.errors import PairingError
from hf_dflash.version import __version__

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
    assert run_cli("inspect") == (1, "", "hf-dflash: OSError: no such model (--debug shows where)\n")


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
def test_debug_is_an_option_anywhere_but_behind_a_double_dash(arguments, expected):
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
