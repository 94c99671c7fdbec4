"""Files that are written whole or not at all."""

import os

import pytest

from hf_dflash.files import atomic_write


def test_a_file_is_written_and_replaced(tmp_path):
    for text in ("first", "zweite Größe"):
        atomic_write(tmp_path / "file.json", text)
        assert (tmp_path / "file.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_a_writing_that_ends_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch):
    atomic_write(tmp_path / "file.json", "old")

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", end)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "file.json", "new")
    assert (tmp_path / "file.json").read_text() == "old"
