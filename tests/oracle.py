"""A draft that knows the answer, to reach every acceptance length on purpose.

`oracle_draft` is a real tiny draft (its network runs, its context grows) whose proposals are replaced by the target's
own continuation, spoiled at one candidate of each round, which a pattern chooses.
"""

import random
from collections.abc import Callable, Sequence

import torch
from tiny_drafts import tiny_config

from hf_dflash.draft.modeling_dflash import DFlashDraftModel

#: Maps the round index (0, 1, 2, ...) to the number of leading candidates that are correct.
Pattern = Callable[[int], int]


def fixed(accepted: int) -> Pattern:
    """The same number of correct candidates in every round."""
    return lambda _round: accepted


def none_right(_round: int) -> int:
    """No candidate is correct: every round commits only the bonus token."""
    return 0


def all_right(_round: int) -> int:
    """Every candidate is correct."""
    return 10**6


def randomly(seed: int, most: int) -> Pattern:
    """A random but repeatable number of correct candidates, 0 to `most`."""

    def pattern(round_index: int) -> int:
        return random.Random(f"{seed}:{round_index}").randint(0, most)

    return pattern


class OracleDraft(DFlashDraftModel):
    """See `oracle_draft`."""

    references: list[list[int]]
    pattern: Pattern
    strict: bool
    wrong: int | None

    def __new__(cls, config, *args, **kwargs):
        return object.__new__(cls)

    def forward(self, noise_embeds, context_hidden_states=None, position_ids=None, **kwargs):
        # The block's first position is the anchor's linear index; a context starting at index 0 means a new row.
        self._anchor = int(position_ids[0, -noise_embeds.shape[1]])
        if int(position_ids[0, 0]) == 0:
            self._row += 1
        return super().forward(noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)

    def propose(self, hidden, anchor_ids, head):
        proposed = super().propose(hidden, anchor_ids, head)
        reference = self.references[self._row % len(self.references)]
        known = self._anchor < len(reference) and reference[self._anchor] == int(anchor_ids[0])
        assert known or not self.strict, "the text left the reference before this anchor"
        num_correct = self.pattern(self.rounds)
        self.rounds += 1
        for column in range(proposed.shape[1]):
            index = self._anchor + 1 + column
            token = reference[index] if index < len(reference) else 1
            # One candidate is wrong on purpose; the correct ones after it must not count.
            wrong = (token + 1) % self.config.vocab_size if self.wrong is None else self.wrong
            proposed[0, column] = wrong if column == num_correct else token
        return proposed


def oracle_draft(
    target,
    references: Sequence[Sequence[int]] | torch.Tensor,
    pattern: Pattern,
    block_size: int = 8,
    taps: Sequence[int] = (0, 2),
    strict: bool = True,
    wrong: int | None = None,
    **overrides,
) -> OracleDraft:
    """Build an oracle draft for `target`.

    Args:
        target: the model it drafts for.
        references: per row, the unpadded ids of prompt and continuation, in decoding order.
        pattern: how many candidates of each round are correct.
        block_size, taps: those of the draft checkpoint it imitates.
        strict: fail if the text leaves the references, which may only happen when rounding decides.
        wrong: the wrong candidate; by default the id after the correct one.
    """
    config = target.config.get_text_config(decoder=True)
    draft_config = tiny_config(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        block_size=block_size,
        taps=tuple(taps),
        mask_token_id=3,
        **overrides,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = OracleDraft(draft_config).float().eval()
    draft.references = [list(map(int, reference)) for reference in references]
    draft.pattern = pattern
    draft.strict = strict
    draft.wrong = wrong
    draft.rounds = 0
    draft._row = -1
    return draft
