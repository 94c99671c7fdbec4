"""Text read as UTF-8, JSON that every parser reads, and files that are written whole or not at all."""

import gzip
import json
import os

import pytest

from hf_dflash.draft.errors import PromptError
from hf_dflash.files import atomic_write, check_text, dump_json, read_jsonl, without_nan

BOM = b"\xef\xbb\xbf"


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


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize(
    "content",
    [
        BOM + b'{"a": "\xc3\xa9"}\n\n{"b": 2}\n',
        b'{"a": "\xc3\xa9"}\r\n\r\n{"b": 2}',
        BOM + b'{"a": "\xc3\xa9"}\n\n' + BOM + b'{"b": 2}\n',
    ],
    ids=["BOM", "no BOM", "two files with BOMs, one after the other"],
)
def test_json_lines_with_and_without_a_byte_order_mark(tmp_path, pack, content):
    path = tmp_path / ("lines.jsonl" if pack is bytes else "lines.jsonl.gz")
    path.write_bytes(pack(content))
    assert list(read_jsonl(path)) == [(1, {"a": "é"}), (3, {"b": 2})]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_line_that_is_not_utf8_is_named(tmp_path, pack):
    path = tmp_path / ("lines.jsonl" if pack is bytes else "lines.jsonl.gz")
    path.write_bytes(pack(b'{"a": 1}\n{"a": "caf\xe9"}\n'))
    with pytest.raises(ValueError, match=r"lines.jsonl\S*, line 2: found the byte 0xe9 at character 11, expected"):
        list(read_jsonl(path))


def test_utf16_is_named(tmp_path):
    (tmp_path / "lines.jsonl").write_bytes('{"a": 1}\n'.encode("utf-16"))
    with pytest.raises(ValueError, match="line 1: found the byte 0xff at character 1, expected UTF-8"):
        list(read_jsonl(tmp_path / "lines.jsonl"))


@pytest.mark.parametrize(
    ("text", "expected"), [("ab\udcff", "the byte 0xff at character 3"), ("\ud83d", "the lone surrogate U+D83D")]
)
def test_text_that_utf8_cannot_hold(text, expected):
    with pytest.raises(PromptError) as refusal:
        check_text(text, "standard input")
    assert str(refusal.value).startswith(f"standard input: found {expected}")
    assert check_text("é \U0001f600", "this") == "é \U0001f600"


def test_json_has_no_nan():
    value = {"a": [float("nan"), 1.0], "b": (float("-inf"), {"c": float("inf")}), "d": None, "e": 2}
    expected = {"a": [None, 1.0], "b": [None, {"c": None}], "d": None, "e": 2}
    assert without_nan(value) == expected

    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(dump_json(value, indent=1), parse_constant=fail) == expected
