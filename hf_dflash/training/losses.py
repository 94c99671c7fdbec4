"""Training losses: weighted cross-entropy over block positions, distillation, and the loss of DFlash 2's selector.

Also the position weights (fixed decay, D-PACE) and simulated acceptance. A block has `s` positions: position 0 is the
anchor and never contributes to the loss, `k` = 1 .. s - 1 are the candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_dflash.draft.modeling_dflash import CandidateSelector
from hf_dflash.training.packing import IGNORED


def default_gamma(block_size: int) -> float:
    """Return the published decay: 7 for block 16, 5 for 10, 4 for 8; for other sizes the line through 8 and 16."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, 4.0 + (block_size - 8) * 3 / 8))


def decay_weights(block_size: int, gamma: float) -> torch.Tensor:
    """Return `(s - 1,)` float32 weights `exp(-(k - 1) / gamma)` for k = 1 .. s - 1; the first candidate weighs 1."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def d_pace_weights(cross_entropy: torch.Tensor, loss_mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return dynamic position weights: how much each position adds to the expected number of accepted tokens.

    With confidence `q_i = (1 - alpha) * exp(-ce_i) + alpha`, the weight of position j is the sum over m >= j of
    `q_1 * ... * q_m` (arXiv 2605.18810, equations 7 and 8). The weights carry no gradient. alpha = 1 gives s - 1,
    s - 2, ..., 1.

    Args:
        cross_entropy: `(..., s - 1)`.
        loss_mask: `(..., s - 1)` bool; a position outside the mask gets weight 0 and ends the sum.
    """
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach().float()) + alpha
    reached = torch.cumprod(torch.where(loss_mask, confidence, torch.zeros_like(confidence)), dim=-1)
    return torch.flip(torch.cumsum(torch.flip(reached, (-1,)), dim=-1), (-1,)) * loss_mask


@dataclass(frozen=True)
class ReducedVocabulary:
    """The subset of the vocabulary that the loss is computed over.

    Attributes:
        ids: `(V',)` target ids, ascending.
        index: `(V,)` position of each id in `ids`, -1 if it is not included.
    """

    ids: torch.LongTensor
    index: torch.LongTensor

    @classmethod
    def of(cls, ids: torch.LongTensor, vocab_size: int) -> "ReducedVocabulary":
        """Build from any ids; duplicates are fine."""
        ids = torch.unique(ids)
        index = torch.full((vocab_size,), -1, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, index)


def cross_entropy(
    hidden: torch.Tensor,
    labels: torch.LongTensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    teacher_logits_of: Callable[[slice], torch.Tensor] | None = None,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the cross-entropy of every row, with at most `chunk` rows of logits at a time (forward and backward).

    Args:
        hidden: `(rows, hidden_size)`.
        labels: `(rows,)` indices into the output of `logits_of`.
        logits_of: maps `(n, hidden_size)` to `(n, vocabulary)`.
        teacher_logits_of: maps a slice of rows to the target's logits for them, over the same vocabulary.

    Returns:
        cross-entropy `(rows,)`, KL(target || draft) `(rows,)` (zeros without a teacher), argmax `(rows,)`; the first
        two in float32.
    """

    def one_chunk(states: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = F.log_softmax(logits_of(states).float(), dim=-1)
        entropy = F.nll_loss(scores, labels[rows], reduction="none")
        if teacher_logits_of is None:
            return entropy, torch.zeros_like(entropy), scores.argmax(-1)
        teacher = F.log_softmax(teacher_logits_of(rows).float(), dim=-1)
        return entropy, F.kl_div(scores, teacher, reduction="none", log_target=True).sum(-1), scores.argmax(-1)

    slices = [slice(at, min(at + chunk, len(hidden))) for at in range(0, len(hidden), chunk)]
    if len(slices) == 1:
        return one_chunk(hidden, slices[0])
    chunks = [checkpoint(one_chunk, hidden[rows], rows, use_reentrant=False) for rows in slices]
    return tuple(torch.cat(column) for column in zip(*chunks, strict=True))


def selector_cross_entropy(
    selector: CandidateSelector,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    vocabulary: torch.LongTensor,
    previous: torch.LongTensor,
    labels: torch.LongTensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute DFlash 2's selector loss: pick the label among the `top_k` candidates, given the true predecessor.

    The score is the selector's own: `logit + <predecessor[previous] * projection(hidden), successor[candidate]>`.

    Args:
        hidden: `(rows, hidden_size)`.
        logits: `(rows, V')` over `vocabulary`.
        vocabulary: `(V',)` target ids of the logits' columns.
        previous: `(rows,)` target id of the previous token.
        labels: `(rows,)` target id to pick.

    Returns:
        cross-entropy `(rows,)`, 0 if the label is not among the candidates; whether it is, `(rows,)` bool.
    """
    unary, columns = torch.topk(logits, selector.top_k, dim=-1)
    candidates = vocabulary[columns]
    query = F.embedding(previous, selector.predecessor_codebook) * selector.hidden_projection(hidden)
    successors = F.embedding(candidates, selector.successor_codebook)
    scores = unary.float() + (successors.float() @ query.float().unsqueeze(-1)).squeeze(-1)
    hits = candidates == labels[:, None]
    recalled = hits.any(-1)
    entropy = F.cross_entropy(scores, hits.int().argmax(-1), reduction="none")
    return torch.where(recalled, entropy, torch.zeros_like(entropy)), recalled


def accepted_counts(candidates: torch.LongTensor, labels: torch.LongTensor) -> torch.LongTensor:
    """Count the leading candidates of each block that match the text: two `(blocks, s - 1)` to one `(blocks,)`.

    Candidates [5, 6, 7] with labels [5, 9, 7] accept 1. An ignored label counts as a mismatch.
    """
    return torch.cumprod((candidates == labels) & (labels != IGNORED), dim=-1).sum(-1)
