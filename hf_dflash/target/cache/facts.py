"""Properties of a transformers cache: its keyword in model and `generate` arguments, its length and its attention
windows.
"""

from dataclasses import fields

from transformers import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

#: The cache's keyword in `generate`, forwards and outputs: `cache` since transformers 5.24, `past_key_values` before.
CACHE_KEYWORD = "cache" if "cache" in {f.name for f in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


def tokens_in(cache: Cache) -> int | None:
    """Return the tokens that a cache has read, padding included; None if it has read some but no layer counts them (a
    recurrent model).
    """
    if len(cache.layers) and all(cache.is_linear):
        return None if cache.has_previous_state() else 0
    return int(cache.get_seq_length())


def attention_windows(cache: Cache) -> list[int | None]:
    """Return each attention layer's sliding window in tokens, None for full attention. Recurrent layers are skipped:
    they return no attentions.
    """
    return [
        getattr(layer, "sliding_window", None)
        for layer, linear in zip(cache.layers, cache.is_linear, strict=True)
        if not linear
    ]
