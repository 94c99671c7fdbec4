"""How many of a draft's candidates a stored response would have accepted.

Proposes a block at every position of the response, for acceptance by block position, and walks through the response as
decoding does, for tau. If the responses are the target's greedy text (or one fixed sampled text), the walk gives the
acceptance length of real decoding, because a round depends only on the committed text before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.losses import accepted_counts
from hf_dflash.training.packing import pack_blocks
from hf_dflash.training.states import StateCapture, run_blocks


@dataclass
class Acceptance:
    """Acceptance over a set of responses.

    Attributes:
        reached: for k = 1 .. s - 1, the number of blocks whose first k candidates all match the text, over all anchors.
        blocks: number of anchors.
        tokens, rounds: of the walk. `tau` = tokens / rounds, accepted and bonus tokens per target forward.
    """

    reached: list[int] = field(default_factory=list)
    blocks: int = 0
    tokens: int = 0
    rounds: int = 0

    @property
    def tau(self) -> float:
        """Acceptance length of the walk."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def by_position(self) -> list[float]:
        """For each k, the fraction of anchors at which candidates 1 .. k all match."""
        return [count / self.blocks for count in self.reached] if self.blocks else []

    def __iadd__(self, other: "Acceptance") -> "Acceptance":
        width = max(len(self.reached), len(other.reached))
        pad = lambda counts: counts + [0] * (width - len(counts))  # noqa: E731
        self.reached = [a + b for a, b in zip(pad(self.reached), pad(other.reached), strict=True)]
        self.blocks += other.blocks
        self.tokens += other.tokens
        self.rounds += other.rounds
        return self


def walk(accepted: list[int], limit: int) -> tuple[int, int]:
    """Return the tokens and rounds of decoding a response if anchor i has `accepted[i]` candidates accepted.

    Example:
        accepted [2, 0, 0, 1, 0], limit 5 (a response of 6 tokens, the first from the prefill): round 1 at anchor 0
        yields 3 tokens, round 2 at anchor 3 yields 2, so (5, 2).
    """
    at, rounds = 0, 0
    while at < limit:
        at += accepted[at] + 1
        rounds += 1
    return min(at, limit), rounds


@torch.no_grad()
def measure_acceptance(
    draft: DFlashDraftModel,
    target: PreTrainedModel | Target,
    sequences: Iterable[tuple[list[int], list[int]]],
    *,
    block_size: int | None = None,
    blocks_per_forward: int = 64,
) -> Acceptance:
    """Measure acceptance over `(prompt_ids, response_ids)` pairs, proposing a block at every response position.

    Args:
        block_size: as in decoding, from 2 to the checkpoint's (the default).
        blocks_per_forward: blocks packed into one forward; bounds memory.
    """
    was_training = draft.training
    draft.eval()
    target = target if isinstance(target, Target) else Target(target)
    capture = StateCapture(target, draft.config.target_layer_ids)
    total = Acceptance()
    for prompt, response in sequences:
        total += _measure_one(
            draft, target, capture, prompt, response, block_size or draft.config.block_size, blocks_per_forward
        )
    draft.train(was_training)
    return total


def _measure_one(
    draft: DFlashDraftModel,
    target: Target,
    capture: StateCapture,
    prompt: list[int],
    response: list[int],
    block_size: int,
    width: int,
) -> Acceptance:
    ids = torch.tensor([prompt + response], device=target.model.device)
    length, start = ids.shape[1], len(prompt)
    if length - start < 2:
        return Acceptance()
    taps = capture(ids).taps.to(draft.device)
    counts: list[int] = []
    for at in range(start, length - 1, width):
        anchors = torch.arange(at, min(at + width, length - 1))
        packed = pack_blocks(ids, [length], [anchors], block_size, draft.config.mask_token_id)
        hidden = run_blocks(draft, draft, target, taps, packed)[0]
        # Contiguous: on the CPU, a linear layer over a strided view of many rows took 60 times as long.
        candidates = draft.propose(
            hidden[:, 1:].contiguous(), ids[0, anchors.to(ids.device)].to(hidden.device), target.head
        )
        counts += accepted_counts(candidates.to(ids.device), packed.labels[0, :, 1:]).tolist()
    tokens, rounds = walk(counts, len(counts))
    reached = [sum(count >= k for count in counts) for k in range(1, block_size)]
    return Acceptance(reached, len(counts), tokens, rounds)
