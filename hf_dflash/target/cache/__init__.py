"""Commit a prefix of a verified block, in the target's cache (one file per layer kind) and in the draft's context.

All use of transformers' cache API is in this package.
"""

from hf_dflash.target.cache.draft_context import DraftContextCache
from hf_dflash.target.cache.facts import CACHE_KEYWORD, attention_windows, tokens_in
from hf_dflash.target.cache.target_cache import TargetCache

__all__ = ["CACHE_KEYWORD", "DraftContextCache", "TargetCache", "attention_windows", "tokens_in"]
