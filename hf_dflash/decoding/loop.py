"""The decoding loop: prefill, then rounds of propose, verify, accept, commit.

This module only sets the order of a round and passes data between its phases.
"""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_dflash.decoding.drafting import DFlashCandidateGenerator, move_contexts
from hf_dflash.decoding.statistics import DFlashStatistics, RoundTrace
from hf_dflash.decoding.text import Continuation
from hf_dflash.target.cache import CACHE_KEYWORD, TargetCache, attention_windows
from hf_dflash.target.processes import Lockstep
from hf_dflash.target.rope import length_dependent_rope
from hf_dflash.target.target import Taps, Target


def decode(
    target: Target,
    generator: DFlashCandidateGenerator,
    text: Continuation,
    target_cache: TargetCache,
    taps: Taps,
    lockstep: Lockstep,
    *,
    block_size: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    statistics: DFlashStatistics,
    trace: RoundTrace,
    row: int = 0,
) -> None:
    """Generate one row, from its prompt to the point where plain generate would stop.

    Args:
        target, generator, text, target_cache, taps: the parts of this generation; `target_cache` and `taps` are
            already entered as context managers.
        lockstep: keeps the processes in step if several share the target.
        block_size: block length, anchor included; shortened if fewer tokens are left before the maximum length, or if
            the frequencies of the target's RoPE change within the block.
        generation_config, model_kwargs: as prepared by core for its decoding methods.
        statistics, trace: record what happens in each round.
        row: index of the row in the batch, for the trace.
    """
    rope, windows = length_dependent_rope(target.model), attention_windows(target_cache.cache)

    lockstep.before_forward()
    with statistics.phase("prefill"), taps.recording():
        outputs = target.prefill(text.ids, generation_config, model_kwargs)
    _extend_with_prompt(generator, target_cache, taps, outputs, model_kwargs.get("attention_mask"))
    text.records.add_prefill(outputs, windows)
    text.accept(outputs.logits[:, -1:], text.ids[:, :0])
    model_kwargs = target.advance(outputs, model_kwargs, 1)
    statistics.prefills += 1

    anchor_alone = False
    while not text.finished:
        # A round commits at most one token per input, so verify no more inputs than there are tokens left to generate.
        # The draft may use one more position: with 3 tokens left, it drafts [anchor, mask, mask, mask] and the target
        # verifies [anchor, candidate, candidate].
        remaining = text.remaining_tokens
        limit = rope.block_limit(_anchor_position(text, target_cache, model_kwargs)) if rope else block_size
        num_inputs = 1 if anchor_alone else min(block_size, remaining, limit)
        candidates = text.ids[:, :0]
        with statistics.phase("propose"):
            if num_inputs > 1:
                candidates = generator.propose(text.anchor_ids, min(block_size, remaining + 1))[:, : num_inputs - 1]
            else:
                lockstep.dummy_proposal()
        draft_bytes = generator.context.num_bytes()

        lockstep.before_forward()
        with statistics.phase("verify"), taps.recording():
            target_cache.begin_block()
            outputs, candidates = _verify(target, text, candidates, outputs, model_kwargs)
        num_inputs, old_cache = candidates.shape[1] + 1, target_cache.cache
        replaced = target_cache.replaced_by(outputs.get(CACHE_KEYWORD), num_inputs)

        with statistics.phase("accept"):
            block = torch.cat([text.ids[:, -1:], candidates], dim=-1)
            accepted, committed = text.accept(outputs.logits, candidates)
            taken = int(committed)

        # If the candidates made the anchor's logits NaN, nothing is committed and the next round verifies it alone.
        anchor_alone = taken == 0
        with statistics.phase("commit"):
            block_taps = taps.take(generator.device)[:, -num_inputs:][:, :taken]
            if anchor_alone:
                target_cache.roll_back()
            elif replaced:
                move_contexts(old_cache, target_cache.cache)
                text.records.add_prefill(outputs, windows)
            else:
                target_cache.commit(committed, num_inputs)
                text.records.add_block(outputs, taken, windows)
            if taken:
                generator.context.extend(block_taps)
                model_kwargs = target.advance(outputs, model_kwargs, taken)

        statistics.add_round(num_inputs - 1, int(accepted), taken, draft_bytes)
        trace.add(row, statistics.rounds - 1, block[0], int(accepted), text.ids[0, text.ids.shape[1] - taken :])
    lockstep.dummy_proposal()


def _extend_with_prompt(
    generator: DFlashCandidateGenerator,
    target_cache: TargetCache,
    taps: Taps,
    outputs: ModelOutput,
    attention_mask: torch.Tensor | None,
) -> None:
    """Add the taps of the prompt to the draft's context, without those of tokens that are in it already.

    A target that started a new cache for the prompt has read the tokens of the old one again.
    """
    prompt_taps, old_cache, num_cached = taps.take(generator.device), target_cache.cache, target_cache.get_seq_length()
    if target_cache.replaced_by(outputs.get(CACHE_KEYWORD), 1):
        move_contexts(old_cache, target_cache.cache)
        if prompt_taps.shape[1] > (num_cached or 0):
            prompt_taps = prompt_taps[:, num_cached or 0 :]
    generator.context.extend(_real_tokens(prompt_taps, attention_mask))


def _verify(
    target: Target,
    text: Continuation,
    candidates: torch.LongTensor,
    outputs: ModelOutput,
    model_kwargs: dict[str, Any],
) -> tuple[ModelOutput, torch.LongTensor]:
    """Verify the anchor and the candidates; return the outputs and the candidates that were verified: all or none."""
    ids = torch.cat([text.ids, candidates], dim=-1)
    inputs = target.advance(outputs, model_kwargs, candidates.shape[1])
    verified = target.verify(ids, candidates.shape[1] + 1, inputs)
    if verified is None:
        candidates, verified = candidates[:, :0], target.verify(text.ids, 1, model_kwargs)
        assert verified is not None, "a single token is always read"
    return verified, candidates


def _anchor_position(text: Continuation, target_cache: TargetCache, model_kwargs: dict[str, Any]) -> int:
    """Return the position of the anchor as the target's RoPE counts it: without padding, and shorter after images."""
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None:
        return int(position_ids[..., -1].max())
    length = target_cache.get_seq_length()
    return text.ids.shape[1] - 1 if length is None else length


def _real_tokens(taps: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the taps of the real tokens; padding never enters the draft's context.

    Args:
        taps: `(1, n, width)` of the last n tokens.
        attention_mask: `(1, length)` of the whole sequence so far, or None if nothing is padded.

    Example:
        mask [[0, 0, 1, 1, 1]], taps of 5 tokens: keep columns 2, 3, 4. In a second turn the mask covers 9 tokens, of
        which the forward processed the last 4: only the last 4 mask entries apply to these taps.
    """
    if attention_mask is None:
        return taps
    return taps[:, attention_mask[0, -taps.shape[1] :].bool().to(taps.device)]
