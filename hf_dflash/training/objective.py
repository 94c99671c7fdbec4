"""The loss of one training step.

Samples the step's anchors, packs the blocks, runs target and draft, and combines the terms of the loss. Optimization,
checkpoints and logging are left to `trainer`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.losses import (
    ReducedVocabulary,
    accepted_counts,
    cross_entropy,
    d_pace_weights,
    decay_weights,
    default_gamma,
    selector_cross_entropy,
)
from hf_dflash.training.packing import IGNORED, PackedBlocks, choose_anchors, pack_blocks
from hf_dflash.training.settings import TrainingSettings
from hf_dflash.training.states import StateCapture, TargetStates, head_rows, measure_logit_transform, run_blocks


@dataclass(frozen=True)
class StepLoss:
    """The result of one step.

    Attributes:
        loss: scalar with gradient.
        metrics: for the log, by name: terms of the loss and the acceptance of the step's blocks.
    """

    loss: torch.Tensor
    metrics: dict[str, float]


class Objective:
    """The training loss of a draft.

    Args:
        draft: the unwrapped draft.
        target: the frozen target.
        settings: checked settings.
        frequent: `(n,)` token ids that are always in the reduced loss vocabulary, or None for the full vocabulary.

    Raises:
        TrainingError: distillation was requested, and the target's logits cannot be computed from its head.
    """

    def __init__(
        self, draft: DFlashDraftModel, target: Target, settings: TrainingSettings, frequent: torch.LongTensor | None
    ):
        self._draft, self._target, self._settings, self._frequent = draft, target, settings, frequent
        self._capture = StateCapture(target, draft.config.target_layer_ids, with_final=settings.distillation > 0)
        block_size = draft.config.block_size
        self._decay = decay_weights(block_size, settings.gamma or default_gamma(block_size))
        self._transform = measure_logit_transform(target) if settings.distillation else None
        self._head_rows: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __call__(self, model: Any, batch: dict[str, torch.Tensor], step: int) -> StepLoss:
        """Compute the loss of one batch.

        Args:
            model: the draft, possibly wrapped for several devices.
            batch: as returned by `records.collate`.
            step: the trainer's global step. Together with the seed and a record's index it determines the record's
                anchors, so a resumed run samples the same ones.
        """
        packed = self._pack(batch, step)
        states = self._states(batch)
        hidden = run_blocks(model, self._draft, self._target, states.taps.to(packed.input_ids.device), packed)
        loss_mask = packed.labels != IGNORED
        rows = hidden[loss_mask]  # (rows, hidden): all candidates that have a label
        labels = packed.labels[loss_mask]
        vocabulary = self._vocabulary(labels)
        entropy, divergence, best = cross_entropy(
            rows,
            labels if vocabulary is None else vocabulary.index[labels],
            lambda part: self._logits(part, vocabulary),
            teacher_logits_of=self._teacher(states, packed, loss_mask, vocabulary),
            chunk=self._settings.loss_chunk,
        )
        weights = self._weights(entropy, loss_mask)
        share = self._settings.distillation
        loss = self._reduce(entropy * (1 - share) + divergence * share, weights, packed)
        metrics = {"cross_entropy": float(entropy.detach().mean())}
        if share:
            metrics["divergence"] = float(divergence.detach().mean())
        if self._draft.config.dflash_version == 2:
            selector_entropy, recalled = self._selector_loss(rows, labels, vocabulary, packed, loss_mask)
            loss = loss + self._settings.selector_weight * self._reduce(selector_entropy, weights * recalled, packed)
            metrics["selector_recall"] = float(recalled.float().mean())
        metrics["tau_of_blocks"] = self._tau(best if vocabulary is None else vocabulary.ids[best], packed, loss_mask)
        return StepLoss(loss, metrics)

    def _pack(self, batch: dict[str, torch.Tensor], step: int) -> PackedBlocks:
        anchors = []
        for index, prompt, length in zip(
            batch["indices"].tolist(), batch["prompt_lengths"].tolist(), batch["lengths"].tolist(), strict=True
        ):
            # The hash of a tuple of integers is the same in every process.
            generator = torch.Generator().manual_seed(hash((self._settings.seed, step, index)) & (2**63 - 1))
            anchors.append(choose_anchors(prompt, length, self._settings.anchors, generator))
        config = self._draft.config
        ids = batch["input_ids"].to(self._draft.device)
        return pack_blocks(ids, batch["lengths"].tolist(), anchors, config.block_size, config.mask_token_id)

    def _states(self, batch: dict[str, torch.Tensor]) -> TargetStates:
        if "taps" in batch:
            return TargetStates(batch["taps"], batch.get("final"))
        return self._capture(batch["input_ids"])

    def _vocabulary(self, labels: torch.LongTensor) -> ReducedVocabulary | None:
        """Return the frequent tokens plus every label of this step, so that no label is ever missing."""
        if self._frequent is None:
            return None
        return ReducedVocabulary.of(torch.cat([self._frequent.to(labels.device), labels]), self._target.num_embeddings)

    def _logits(self, hidden: torch.Tensor, vocabulary: ReducedVocabulary | None) -> torch.Tensor:
        """Map `(n, hidden)` to the draft's `(n, V')` logits, scaled and soft-capped as in decoding."""
        return self._draft.compute_logits(hidden, lambda states: self._head(states, vocabulary))

    def _head(self, hidden: torch.Tensor, vocabulary: ReducedVocabulary | None) -> torch.Tensor:
        """Map `(n, hidden)` to the `(n, V')` output of the target's head."""
        if vocabulary is None:
            return self._target.head(hidden)
        if self._head_rows is None:
            self._head_rows = head_rows(self._target, hidden)
        weight, bias = self._head_rows
        return F.linear(hidden.to(weight.dtype), weight[vocabulary.ids], None if bias is None else bias[vocabulary.ids])

    def _teacher(
        self, states: TargetStates, packed: PackedBlocks, loss_mask: torch.Tensor, vocabulary: ReducedVocabulary | None
    ) -> Any:
        """Return a function from a slice of rows to the target's logits for them, or None without distillation.

        The token at position p is predicted by the target's state at p - 1: a block with anchor 4 is trained on the
        tokens at 5, 6, ... with the states at 4, 5, ...
        """
        transform = self._transform
        if states.final is None or transform is None:
            return None
        final = states.final.to(packed.input_ids.device)
        positions = packed.position_ids[:, packed.context_length :].view_as(loss_mask)
        row_of, before = loss_mask.nonzero()[:, 0], positions[loss_mask] - 1

        @torch.no_grad()
        def logits(rows: slice) -> torch.Tensor:
            return transform(self._head(final[row_of[rows], before[rows]], vocabulary))

        return logits

    def _weights(self, entropy: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return the `(rows,)` weights of the positions in the loss mask."""
        candidates = loss_mask[..., 1:]
        if self._settings.weighting == "decay":
            return self._decay.to(entropy.device).expand(candidates.shape)[candidates]
        grid = torch.zeros(candidates.shape, dtype=torch.float32, device=entropy.device)
        grid[candidates] = entropy.detach().float()
        return d_pace_weights(grid, candidates, self._settings.d_pace_alpha)[candidates]

    def _reduce(self, values: torch.Tensor, weights: torch.Tensor, packed: PackedBlocks) -> torch.Tensor:
        """Return the weighted mean, or for D-PACE the weighted sum per block: its weights carry the expected length."""
        if self._settings.weighting == "decay":
            return (values * weights).sum() / weights.sum().clamp(min=1e-6)
        return (values * weights).sum() / (packed.anchors >= 0).sum()

    def _selector_loss(
        self,
        rows: torch.Tensor,
        labels: torch.LongTensor,
        vocabulary: ReducedVocabulary | None,
        packed: PackedBlocks,
        loss_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Train the selector with the true predecessor: the previous label, or the anchor for the first candidate."""
        tokens = packed.labels.clone()
        tokens[..., 0] = packed.input_ids.view_as(tokens)[..., 0]
        previous = tokens.roll(1, dims=-1)[loss_mask]  # position 0 is never in the mask, so nothing wraps around
        ids = torch.arange(self._target.num_embeddings, device=rows.device) if vocabulary is None else vocabulary.ids
        parts = [
            selector_cross_entropy(
                self._draft.candidate_selector,
                rows[part],
                self._logits(rows[part], vocabulary),
                ids,
                previous[part],
                labels[part],
            )
            for part in torch.arange(len(rows), device=rows.device).split(self._settings.loss_chunk)
        ]
        return torch.cat([entropy for entropy, _ in parts]), torch.cat([recalled for _, recalled in parts])

    @staticmethod
    def _tau(best: torch.LongTensor, packed: PackedBlocks, loss_mask: torch.Tensor) -> float:
        """Return the candidates per block that argmax would have accepted, plus the bonus token; not the walk's tau."""
        candidates = torch.full_like(packed.labels, -1)
        candidates[loss_mask] = best
        real = packed.anchors >= 0
        return 1.0 + float(accepted_counts(candidates[..., 1:], packed.labels[..., 1:])[real].float().mean())
