"""The tables of docs/quantized-targets.md say what the stored results say."""

import importlib.util
import json
from pathlib import Path

import pytest
from quantized_targets import KINDS, REFUSED

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_quantized_table", ROOT / "scripts" / "make_quantized_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tables_are_those_of_the_stored_results(script, language):
    page = script.PAGES[language].read_text()
    assert page == script.with_tables(page, language)


def test_no_stored_text_parts_for_another_reason_than_rounding(script):
    records = json.loads(script.KINDS_FILE.read_text())
    assert {key.split()[0] for key in records} <= {*KINDS, *REFUSED}
    for key, record in records.items():
        assert ("error" in record) == (key.split()[0] in REFUSED), key
        for mode in ("greedy", "sampled"):
            if mode in record:
                assert record[mode]["same"] + record[mode]["explained"] == record[mode]["texts"], key


def test_awq_in_float32_is_exact_in_the_stored_results(script):
    records = json.loads(script.KINDS_FILE.read_text())
    exact = [record["greedy"] for key, record in records.items() if key.startswith("awq") and key.endswith("float32")]
    assert exact and all(found["same"] == found["texts"] == 12 for found in exact)
