"""Decoding with the draft of the repository that this file was published in.

    target.generate(**inputs, custom_generate="<this repository>", trust_remote_code=True)

gives exactly what `target.generate(**inputs)` gives, sooner. It needs the package hf-dflash.

Owns: finding the draft. Does not know: how to decode, which hf_dflash does.
"""

import inspect
from functools import lru_cache


def generate(model, draft=None, **arguments):
    """What transformers calls for `custom_generate="<repository>"`: everything raw, as `generate` got it.

    Args:
        model: the target.
        draft: a loaded draft, or the name of one; default: the one of this repository.
        arguments: all other arguments of `generate`.

    Raises:
        ImportError: hf-dflash is not installed.
        ValueError: this repository's name is not known, and no draft was given.
    """
    try:
        from hf_dflash import DFlashGenerate, load_draft
    except ImportError as error:
        raise ImportError(
            "Decoding with a DFlash draft needs the package hf-dflash: run `pip install hf-dflash`."
        ) from error
    if draft is None:
        # transformers runs a copy of this file and does not say whose, but the call to `generate` named it.
        draft = inspect.currentframe().f_back.f_locals.get("custom_generate")
    if draft is None:
        raise ValueError(
            "Which draft? Name the repository as custom_generate=, or pass draft= (a loaded draft or its name)."
        )
    if isinstance(draft, str):
        draft = _loaded(load_draft, draft, model.device)
    return model.generate(**arguments, custom_generate=DFlashGenerate(draft))


@lru_cache(maxsize=1)
def _loaded(load_draft, name, device):
    """The draft, loaded at the first call and kept for the next."""
    return load_draft(name).to(device)
