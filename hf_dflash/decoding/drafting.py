"""The draft's side of one generation.

Owns: the draft's context (which stretch of the text it covers and the taps waiting to enter it) and proposing a block.

Does not know: acceptance, streamers, stops, how the target reads anything.
"""

import weakref

import torch
from transformers import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.cache import DraftContextCache
from hf_dflash.target.processes import Agreement, alone
from hf_dflash.target.target import Target


class DraftContext:
    """What a draft knows of the text: keys and values of the committed tokens, and taps that have not been fused yet.

    It covers one unbroken stretch `[first, end)` of linear token indices (padding is not counted, and multimodal
    targets with three-dimensional positions count tokens all the same). The stretch usually begins at 0; it begins
    later when the target's cache was filled without the draft looking on.

    Args:
        draft: the draft whose context it is.
        first: linear index of the first token it will cover.
        max_length: the most tokens that the context can reach.
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
        """Linear index behind the last token whose taps have arrived: the anchor's index."""
        return self.fused_end + sum(taps.shape[1] for taps in self._pending)

    @property
    def fused_end(self) -> int:
        """Linear index behind the last token in the draft's cache."""
        return self.first + self.cache.get_seq_length()

    def extend(self, taps: torch.Tensor) -> None:
        """Append the taps `(1, n, taps * hidden)` of the next n committed tokens; the draft reads them with the next
        block.
        """
        self._pending.append(taps)

    def take(self) -> torch.Tensor:
        """The waiting taps `(1, n, taps * hidden)`, which the caller feeds to the draft now."""
        taps = torch.cat(self._pending, dim=1) if len(self._pending) > 1 else self._pending[0]
        self._pending.clear()
        return taps

    def covers(self, draft: DFlashDraftModel, end: int) -> bool:
        """Whether this is the draft's context of everything up to linear index `end`, possibly of more."""
        return self._draft() is draft and self.first < end <= self.end

    def crop_to(self, end: int) -> bool:
        """Forget everything from linear index `end` on: the target's cache was cropped between two turns.

        Returns:
            whether that could be done; a sliding layer of the draft keeps little more than its window.
        """
        try:
            self.cache.crop(-max(0, self.fused_end - end))
        except UnsupportedOptionError:
            return False
        waiting = self.end - self.fused_end
        if waiting:
            self._pending = [self.take()[:, : max(0, end - self.fused_end)]]
        return True

    def num_bytes(self) -> int:
        """Memory of the cache and of the waiting taps, in bytes."""
        return self.cache.num_bytes() + sum(taps.numel() * taps.element_size() for taps in self._pending)


def draft_context(draft: DFlashDraftModel, target_cache: Cache, read: int | None, max_length: int) -> DraftContext:
    """The draft's context that belongs to a target cache which has read `read` real tokens.

    The context lives on the cache object, so that a cache handed back in the next turn brings it along. It is continued
    when it reaches at least as far as the cache (and cropped if the user cropped the cache). Otherwise the cache was
    filled without the draft looking on, or cropped further back than the draft remembers, and the context begins anew
    at `read`.

    Args:
        draft: the draft of this call.
        target_cache: the transformers cache of this call.
        read: real (unpadded) tokens in `target_cache`, or None when it does not count them: then the context itself
            does.
        max_length: the most tokens that the call can reach.
    """
    contexts: list[DraftContext] = target_cache.__dict__.setdefault("_dflash_contexts", [])
    if read is None:
        read = max((context.end for context in contexts), default=0)
    for context in contexts:
        if context.covers(draft, read) and context.crop_to(read):
            return context
    contexts[:] = [context for context in contexts if context._draft() not in (None, draft)]
    contexts.append(DraftContext(draft, read, max_length))
    return contexts[-1]


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposes blocks for one row, from the context and the last committed token.

    Args:
        draft: the draft network.
        target: whose embedding and head the draft borrows.
        context: the draft's context, continued or new.
        agree: makes the processes that share a target propose the same.
    """

    def __init__(self, draft: DFlashDraftModel, target: Target, context: DraftContext, agree: Agreement = alone):
        self._draft = draft
        self._target = target
        self._agree = agree
        self.context = context

    @property
    def device(self) -> torch.device:
        """Where the draft computes, and where its context's taps are brought."""
        return self._draft.device

    def propose(self, anchor_ids: torch.LongTensor, block_size: int) -> torch.LongTensor:
        """Draft one block.

        Args:
            anchor_ids: `(1,)` the last committed token, whose own taps are not known yet.
            block_size: block length, anchor included, at least 2.

        Returns:
            `(1, block_size - 1)` candidates on the anchor's device.

        Example:
            committed tokens 0..9, so the anchor is token 9 and the context covers 0..8. With block_size 4 the block
            stands at positions 9, 10, 11, 12; the outputs at 10, 11, 12 are the candidates for tokens 10, 11, 12.
        """
        draft, context = self._draft, self.context
        block = anchor_ids.new_full((anchor_ids.shape[0], block_size), draft.config.mask_token_id)
        block[:, 0] = anchor_ids
        start = context.fused_end
        taps = context.take()
        positions = torch.arange(start, start + taps.shape[1] + block_size, device=taps.device)
        output = draft(
            noise_embeds=draft.embed(block, self._target.embed).to(taps.device),
            context_hidden_states=taps,
            position_ids=positions.expand(anchor_ids.shape[0], -1),
            cache=context.cache,
        )
        context.cache.crop(-block_size)
        candidates = draft.propose(output.last_hidden_state[:, 1:], anchor_ids.to(taps.device), self._target.head)
        return self._agree(candidates.to(anchor_ids.device))

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        """transformers' contract: `(1, length)` committed ids in, the same with a full block of candidates behind them
        out.
        """
        candidates = self.propose(input_ids[:, -1], self._draft.config.block_size)
        return torch.cat([input_ids, candidates], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """transformers' contract: nothing to adapt, since the block size is chosen per call."""
