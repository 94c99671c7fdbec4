"""Every touch of transformers' cache API, a file per layer kind, and the draft's context.

Owns: committing a prefix of a verified block, in the target's cache and in the draft's context.

Does not know: how a block was proposed, or why a prefix of it was accepted.
"""

from hf_dflash.target.cache.draft_context import DraftContextCache
from hf_dflash.target.cache.facts import CACHE_KEYWORD, attention_windows, tokens_in
from hf_dflash.target.cache.target_cache import TargetCache

__all__ = ["CACHE_KEYWORD", "DraftContextCache", "TargetCache", "attention_windows", "tokens_in"]
