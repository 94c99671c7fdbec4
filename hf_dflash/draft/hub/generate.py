"""Decoding with the draft in this repository.

    target.generate(**inputs, custom_generate="<this repository>", trust_remote_code=True)

gives exactly what `target.generate(**inputs)` gives, faster. This file finds the draft; decoding needs the package
hf-dflash.
"""

import inspect
from functools import lru_cache


def generate(model, draft=None, **arguments):
    """Called by transformers for `custom_generate="<repository>"` with the raw arguments of `generate`.

    Args:
        model: the target.
        draft: a loaded draft, or its name; default: the draft in this repository.
        arguments: all other arguments of `generate`.

    Raises:
        ImportError: hf-dflash is not installed.
        ValueError: the name of this repository is unknown and no draft was given.
    """
    try:
        from hf_dflash import DFlashGenerate, load_draft
    except ImportError as error:
        raise ImportError(
            "Decoding with a DFlash draft needs the package hf-dflash: run `pip install hf-dflash`."
        ) from error
    if draft is None:
        # transformers runs a copy of this file without its repository's name, but the call to `generate` has it.
        draft = inspect.currentframe().f_back.f_locals.get("custom_generate")
    if draft is None:
        raise ValueError(
            "No draft given: pass the repository as custom_generate=, or draft= (a loaded draft or its name)."
        )
    if isinstance(draft, str):
        draft = _loaded(load_draft, draft, model.device)
    return model.generate(**arguments, custom_generate=DFlashGenerate(draft))


@lru_cache(maxsize=1)
def _loaded(load_draft, name, device):
    """Load the draft at the first call and keep it for the next."""
    return load_draft(name).to(device)
