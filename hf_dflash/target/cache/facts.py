"""What can be read off a transformers cache without changing it.

Owns: the cache's name in model and `generate` arguments, its length, its attention windows.

Does not know: how anything is rolled back.
"""

from dataclasses import fields

from transformers import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

#: The cache's keyword in `generate`, in forwards and in outputs: `cache` since transformers 5.24, `past_key_values`
#: before.
CACHE_KEYWORD = "cache" if "cache" in {f.name for f in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


def tokens_in(cache: Cache) -> int | None:
    """Tokens that a cache has read, padding included; None when no layer counts them (a recurrent model) and it has
    read some.
    """
    if len(cache.layers) and all(cache.is_linear):
        return None if cache.has_previous_state() else 0
    return int(cache.get_seq_length())


def attention_windows(cache: Cache) -> list[int | None]:
    """Per attention layer its sliding window in tokens, or None for full attention; recurrent layers return no
    attentions.
    """
    return [
        getattr(layer, "sliding_window", None)
        for layer, linear in zip(cache.layers, cache.is_linear, strict=True)
        if not linear
    ]
