"""The decoding loop: prefill, then rounds of propose, verify, accept, commit.

Owns: the order of a round and what is handed from one phase to the next.

Does not know: model families, checkpoint layouts, how a layer rolls back, where options came from.
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
    """Write one row's text, from its prompt to the stop that plain generate would meet.

    Args:
        target, generator, text, target_cache, taps: the parts of this generation; `target_cache` and `taps` are
            entered.
        lockstep: what other processes must be told, where they share the target.
        block_size: block length, anchor included; shortened where fewer tokens fit before the maximal length.
        generation_config, model_kwargs: as core prepared them for its decoding methods.
        statistics, trace: what the call tells about itself.
        row: which row of the batch this is, for the trace.
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
        # A round commits at most one token per input, so no more inputs than there is room for are verified. The draft
        # may see one position more: with room for 3, it drafts [anchor, mask, mask, mask] and the target reads
        # [anchor, candidate, candidate].
        num_inputs = 1 if anchor_alone else min(block_size, text.room)
        candidates = text.ids[:, :0]
        with statistics.phase("propose"):
            if num_inputs > 1:
                candidates = generator.propose(text.anchor_ids, min(block_size, text.room + 1))[:, : num_inputs - 1]
            else:
                lockstep.instead_of_proposal()
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

        # A block that could not be read commits nothing, and its anchor is read once more, alone.
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
    lockstep.instead_of_proposal()


def _real_tokens(taps: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The taps of real tokens: padding never enters the draft's context.

    Args:
        taps: `(1, n, width)` of the n tokens just read.
        attention_mask: `(1, length)` of everything read so far, or None when nothing is padded.

    Example:
        mask [[0, 0, 1, 1, 1]], taps of 5 tokens: columns 2, 3, 4 stay. In a second turn the mask covers 9 tokens of
        which the forward read the last 4: only the last 4 mask entries speak about these taps.
    """
    if attention_mask is None:
        return taps
    return taps[:, attention_mask[0, -taps.shape[1] :].bool().to(taps.device)]
