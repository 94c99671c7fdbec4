"""The tables of docs/targets.md: made from stored results, and nothing in them failed."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_targets_table.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("make_targets_table", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_says_what_the_stored_results_say(script, language):
    assert script.WORDS[language]["page"].read_text(encoding="utf-8") == script.filled(language)


def test_every_family_was_tried_at_both_ends_and_none_failed(script):
    results = json.loads(script.STORE.read_text(encoding="utf-8"))
    assert len(results) == 2
    for version, families in results.items():
        assert set(families) == set(script.ALL), version
        assert all(family["failed"] == 0 for family in families.values()), version


def test_a_failing_test_is_shown(script):
    family = {"passed": 3, "failed": 1, "refused": None, "differences": {}}
    assert script.verdict(family, {}, script.WORDS["en"]) == "1 of 3 tests fail"
