"""The decoding loop: prefill, then rounds of propose, verify, accept, commit.

This module only sets the order of a round and passes data between its phases.
"""

from typing import Any

import torch
from transformers import GenerationConfig

from hf_dflash.decoding.drafting import DFlashCandidateGenerator
from hf_dflash.decoding.statistics import DFlashStatistics, RoundTrace
from hf_dflash.decoding.text import Continuation
from hf_dflash.target.cache import TargetCache, attention_windows
from hf_dflash.target.processes import Lockstep
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
        block_size: block length, anchor included; shortened if fewer tokens are left before the maximum length.
        generation_config, model_kwargs: as prepared by core for its decoding methods.
        statistics, trace: record what happens in each round.
        row: index of the row in the batch, for the trace.
    """
    draft_device = generator.device
    windows = attention_windows(target_cache.cache)

    lockstep.before_forward()
    with statistics.phase("prefill"), taps.recording():
        outputs = target.prefill(text.ids, generation_config, model_kwargs)
    generator.context.extend(_real_tokens(taps.take(draft_device), model_kwargs.get("attention_mask")))
    text.accept(outputs.logits[:, -1:], text.ids[:, :0])
    text.records.add_prefill(outputs)
    model_kwargs = target.advance(outputs, model_kwargs, 1)
    statistics.prefills += 1

    anchor_alone = False
    while not text.finished:
        # A round commits at most one token per input, so verify no more inputs than there are tokens left to generate.
        # The draft may use one more position: with 3 tokens left, it drafts [anchor, mask, mask, mask] and the target
        # verifies [anchor, candidate, candidate].
        remaining = text.remaining_tokens
        num_inputs = 1 if anchor_alone else min(block_size, remaining)
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
            ids = torch.cat([text.ids, candidates], dim=-1)
            inputs = target.advance(outputs, model_kwargs, num_inputs - 1)
            outputs = target.verify(ids, num_inputs, inputs)

        with statistics.phase("accept"):
            accepted, committed = text.accept(outputs.logits, candidates)
            taken = int(committed)

        # If the candidates made the anchor's logits NaN, nothing is committed and the next round verifies it alone.
        anchor_alone = taken == 0
        with statistics.phase("commit"):
            block_taps = taps.take(draft_device)[:, :taken]
            if anchor_alone:
                target_cache.roll_back()
            else:
                target_cache.commit(committed, num_inputs)
                generator.context.extend(block_taps)
                text.records.add_block(outputs, taken, windows)
                model_kwargs = target.advance(outputs, model_kwargs, taken)

        statistics.add_round(num_inputs - 1, int(accepted), taken, draft_bytes)
        new_ids = text.ids[0, text.ids.shape[1] - taken :]
        trace.add(row, statistics.rounds - 1, ids[0, -num_inputs:], int(accepted), new_ids)
    lockstep.dummy_proposal()


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
