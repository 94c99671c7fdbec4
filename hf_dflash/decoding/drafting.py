"""The draft's side of one generation: its context (the tokens it covers and the taps still to be fused) and the
proposal of a block.
"""

import copy
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.cache import DraftContextCache
from hf_dflash.target.processes import Agreement, single_process
from hf_dflash.target.target import Target


class DraftContext:
    """The draft's context: keys and values of the committed tokens, and taps that have not been fused yet.

    It covers one contiguous range `[first, end)` of linear token indices (padding is not counted; multimodal targets
    with three-dimensional positions also count tokens). The range usually starts at 0. It starts later if the target's
    cache was filled without the draft.

    Args:
        draft: the draft it belongs to.
        first: linear index of the first token it will cover.
        max_length: maximum length of the context in tokens.
    """

    def __init__(self, draft: DFlashDraftModel, first: int, max_length: int):
        config = draft.config
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        self.cache = DraftContextCache(windows, max_length=max_length, block_size=config.block_size)
        self.first = first
        self._pending: list[torch.Tensor] = []
        self._draft = weakref.ref(draft)

    @property
    def end(self) -> int:
        """Linear index after the last token whose taps have been added: the anchor's index."""
        return self.fused_end + sum(taps.shape[1] for taps in self._pending)

    @property
    def fused_end(self) -> int:
        """Linear index after the last token in the draft's cache."""
        return self.first + self.cache.get_seq_length()

    def extend(self, taps: torch.Tensor) -> None:
        """Append the taps `(1, n, taps * hidden)` of the next n committed tokens, to be fused with the next block."""
        self._pending.append(taps)

    def take(self) -> torch.Tensor:
        """Return and clear the pending taps `(1, n, taps * hidden)`; the caller must feed them to the draft."""
        taps = torch.cat(self._pending, dim=1) if len(self._pending) > 1 else self._pending[0]
        self._pending.clear()
        return taps

    def covers(self, draft: DFlashDraftModel, end: int) -> bool:
        """Return whether this context belongs to `draft` and reaches at least linear index `end`."""
        return self._draft() is draft and self.first < end <= self.end

    def crop_to(self, end: int) -> bool:
        """Drop everything from linear index `end` on, after the target's cache was cropped between two turns.

        Returns:
            False if that is not possible, since a sliding layer of the draft keeps little more than its window.
        """
        try:
            self.cache.crop(-max(0, self.fused_end - end))
        except UnsupportedOptionError:
            return False
        if self.end > self.fused_end:
            self._pending = [self.take()[:, : max(0, end - self.fused_end)]]
        return True

    def move_to(self, device: torch.device) -> None:
        """Move the pending taps to the draft's device, which may have changed since the last turn. The cache casts and
        moves its entries by itself.
        """
        self._pending = [taps.to(device) for taps in self._pending]

    def num_bytes(self) -> int:
        """Memory of the cache and the pending taps, in bytes."""
        return self.cache.num_bytes() + sum(taps.numel() * taps.element_size() for taps in self._pending)


class _Contexts(list[DraftContext]):
    """The draft contexts stored on a target's cache, one per draft. A deep copy of the cache copies them.

    A pickle has none, since it cannot refer to a draft of another process: the next call with a draft starts a new
    context. It holds a plain list, so that it can be read without hf_dflash.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return list, ()

    def __deepcopy__(self, memo: dict) -> "_Contexts":
        return _Contexts(copy.deepcopy(context, memo) for context in self)


def draft_context(
    draft: DFlashDraftModel, target_cache: Cache, num_cached: int | None, max_length: int
) -> DraftContext:
    """Return the draft's context for a target cache that holds `num_cached` real tokens.

    The context is stored on the cache object, so a cache passed again in the next turn brings it along. It is continued
    if it reaches at least as far as the cache (and cropped if the user cropped the cache). Otherwise the cache was
    filled without the draft, or cropped further back than the draft's context goes, and a new context starts at
    `num_cached`.

    Args:
        draft: the draft of this call.
        target_cache: the transformers cache of this call.
        num_cached: real (unpadded) tokens in `target_cache`, or None if the cache does not count them; then the
            context's own count is used.
        max_length: maximum length of the call in tokens.
    """
    contexts = target_cache.__dict__.get("_dflash_contexts")
    if not isinstance(contexts, _Contexts):
        contexts = target_cache.__dict__["_dflash_contexts"] = _Contexts()
    if num_cached is None:
        num_cached = max((context.end for context in contexts), default=0)
    for context in contexts:
        if context.covers(draft, num_cached) and context.crop_to(num_cached):
            context.move_to(draft.device)
            return context
    contexts[:] = [context for context in contexts if context._draft() not in (None, draft)]
    contexts.append(DraftContext(draft, num_cached, max_length))
    return contexts[-1]


def move_contexts(old: Cache, new: Cache) -> None:
    """Move the drafts' contexts from a target's cache to the one on which the target continues."""
    if "_dflash_contexts" in old.__dict__:
        new.__dict__["_dflash_contexts"] = old.__dict__.pop("_dflash_contexts")


@contextmanager
def without_autocast(*devices: torch.device) -> Iterator[None]:
    """Turn autocast off on the types of these devices.

    A draft runs in its own dtype: its activations overflow in float16. `torch.autocast` around `generate` is meant for
    the target.
    """
    with ExitStack() as stack:
        for kind in sorted({device.type for device in devices} - {"meta"}):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposes blocks for one row from the draft's context and the last committed token.

    Args:
        draft: the draft network.
        target: the target, whose embedding and head the draft borrows.
        context: the draft's context, continued or new.
        agree: makes the processes that share a target propose the same tokens.
    """

    def __init__(
        self, draft: DFlashDraftModel, target: Target, context: DraftContext, agree: Agreement = single_process
    ):
        self._draft = draft
        self._target = target
        self._agree = agree
        self.context = context

    @property
    def device(self) -> torch.device:
        """The draft's device, to which the taps are moved."""
        return self._draft.device

    def propose(self, anchor_ids: torch.LongTensor, block_size: int) -> torch.LongTensor:
        """Draft one block.

        Args:
            anchor_ids: `(1,)` the last committed token, whose taps are not available yet.
            block_size: block length, anchor included, at least 2.

        Returns:
            `(1, block_size - 1)` candidates on the anchor's device.

        Example:
            committed tokens 0..9, so the anchor is token 9 and the context covers 0..8. With block_size 4 the block
            is at positions 9, 10, 11, 12; the outputs at 10, 11, 12 are the candidates for tokens 10, 11, 12.
        """
        draft, context, head = self._draft, self.context, self._target.head
        block = anchor_ids.new_full((anchor_ids.shape[0], block_size), draft.config.mask_token_id)
        block[:, 0] = anchor_ids
        start = context.fused_end
        taps = context.take()
        positions = torch.arange(start, start + taps.shape[1] + block_size, device=taps.device)
        # The head may be on the CPU although the target is not (offloading).
        with without_autocast(draft.device, anchor_ids.device, self._target.model.device, torch.device("cpu")):
            output = draft(
                noise_embeds=draft.embed(block, self._target.embed).to(taps.device),
                context_hidden_states=taps,
                position_ids=positions.expand(anchor_ids.shape[0], -1),
                cache=context.cache,
            )
            context.cache.crop(-block_size)
            candidates = draft.propose(output.last_hidden_state[:, 1:], anchor_ids.to(taps.device), head)
        # A draft with a head of its own may know ids that a target whose vocabulary was cut cannot embed.
        candidates = candidates.clamp(max=self._target.num_embeddings - 1)
        return self._agree(candidates.to(anchor_ids.device))

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        """Implement transformers' interface: take `(1, length)` committed ids, return them followed by a full block of
        candidates.
        """
        candidates = self.propose(input_ids[:, -1], self._draft.config.block_size)
        return torch.cat([input_ids, candidates], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Implement transformers' interface: nothing to adapt, since the block size is fixed per call."""
