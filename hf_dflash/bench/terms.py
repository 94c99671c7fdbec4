"""Equal terms: all methods decode with the benchmark's own sampling settings.

A checkpoint's `generation_config.json` may set top-k, a repetition penalty and so on. `generate` applies them, but the
authors' loop does not know most of them, and each checkpoint has others. They are therefore set aside for every method;
only the special tokens are kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

KEPT = ("eos_token_id", "pad_token_id", "bos_token_id")
#: Set by every plan, or without effect on the text.
_NOT_SET_ASIDE = (
    *KEPT,
    "do_sample",
    "temperature",
    "max_length",
    "max_new_tokens",
    "use_cache",
    "transformers_version",
)


@contextmanager
def equal_terms(target: PreTrainedModel) -> Iterator[None]:
    """Set the target's generation defaults aside, except for the special tokens, until the block ends."""
    own = target.generation_config
    # Of the defaults that transformers itself fills in, only top_k = 50 changes a distribution.
    target.generation_config = GenerationConfig(top_k=0, **{name: getattr(own, name) for name in KEPT})
    try:
        yield
    finally:
        target.generation_config = own


def set_aside(target: PreTrainedModel) -> dict[str, Any]:
    """Return the target's generation defaults that `equal_terms` sets aside."""
    values = target.generation_config.to_diff_dict()
    kept = {name for name in values if name in _NOT_SET_ASIDE or name.startswith("_")}
    return {name: value for name, value in values.items() if name not in kept and value not in (None, False)}
