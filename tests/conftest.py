"""Fixtures shared by several test files."""

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """Folders of a tiny target with its tokenizer, and of a draft that matches it."""
    from tiny_pair import write_tiny_pair

    return write_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def smollm2():
    """Folders of SmolLM2-135M-Instruct and the shipped draft; for tests marked slow."""
    from smollm2 import smollm2_folders

    return smollm2_folders()


@pytest.fixture
def run_cli(monkeypatch, capsys) -> Callable[..., CommandResult]:
    """Run `hf-dflash` in this process, as the console script does."""

    def run(*arguments: str, stdin: str | bytes = "") -> CommandResult:
        from hf_dflash_cli.app import main

        monkeypatch.setattr(sys, "argv", ["hf-dflash", *map(str, arguments)])
        as_bytes = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(as_bytes), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        return CommandResult(exit_info.value.code or 0, *capsys.readouterr())

    return run
