"""One training step's loss, from a batch of records to a number.

Owns: choosing the step's anchors, packing, running target and draft, and putting the parts of the loss together.

Does not know: optimizers, checkpoints, logging, transformers' Trainer.
"""

from dataclasses import dataclass
from typing import Any

import torch

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
from hf_dflash.training.states import StateCapture, TargetStates, run_blocks


@dataclass(frozen=True)
class StepLoss:
    """What a step yields.

    Attributes:
        loss: scalar with gradient.
        figures: name to number, for the log: parts of the loss and what would have been accepted of the step's blocks.
    """

    loss: torch.Tensor
    figures: dict[str, float]


class Objective:
    """The training loss of a draft.

    Args:
        draft: the bare draft.
        target: frozen.
        settings: as checked.
        frequent: `(n,)` token ids that a reduced loss vocabulary always holds, or None for the whole vocabulary.
    """

    def __init__(
        self, draft: DFlashDraftModel, target: Target, settings: TrainingSettings, frequent: torch.LongTensor | None
    ):
        self._draft, self._target, self._settings, self._frequent = draft, target, settings, frequent
        self._capture = StateCapture(target, draft.config.target_layer_ids, with_final=settings.distillation > 0)
        block_size = draft.config.block_size
        self._decay = decay_weights(block_size, settings.gamma or default_gamma(block_size))
        self._head_rows: torch.Tensor | None = None

    def __call__(self, model: Any, batch: dict[str, torch.Tensor], step: int) -> StepLoss:
        """The loss of one batch.

        Args:
            model: the draft, or the draft wrapped for several devices.
            batch: as `records.collate` makes it.
            step: the trainer's global step; with the settings' seed and a record's index it fixes the record's
                anchors, so that a resumed run draws the same ones.
        """
        packed = self._pack(batch, step)
        states = self._states(batch)
        hidden = run_blocks(model, self._draft, self._target, states.taps.to(packed.input_ids.device), packed)
        learned = packed.labels != IGNORED
        rows = hidden[learned]  # (rows, hidden): the candidates of all blocks that have a label
        labels = packed.labels[learned]
        vocabulary = self._vocabulary(labels)
        entropy, divergence, best = cross_entropy(
            rows,
            labels if vocabulary is None else vocabulary.index[labels],
            lambda part: self._logits(part, vocabulary),
            teacher_logits_of=self._teacher(states, packed, learned, vocabulary),
            chunk=self._settings.loss_chunk,
        )
        weights = self._weights(entropy, learned)
        share = self._settings.distillation
        loss = self._reduce(entropy * (1 - share) + divergence * share, weights, packed)
        figures = {"cross_entropy": float(entropy.detach().mean())}
        if share:
            figures["divergence"] = float(divergence.detach().mean())
        if self._draft.config.dflash_version == 2:
            extra, found = self._selector_loss(rows, labels, vocabulary, packed, learned)
            loss = loss + self._settings.selector_weight * self._reduce(extra, weights * found, packed)
            figures["selector_recall"] = float(found.float().mean())
        figures["tau_of_blocks"] = self._tau(best if vocabulary is None else vocabulary.ids[best], packed, learned)
        return StepLoss(loss, figures)

    def _pack(self, batch: dict[str, torch.Tensor], step: int) -> PackedBlocks:
        anchors = []
        for index, prompt, length in zip(
            batch["indices"].tolist(), batch["prompt_lengths"].tolist(), batch["lengths"].tolist(), strict=True
        ):
            # The hash of integers is the same in every process.
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
        """The frequent tokens and every label of this step, so that no label is ever left out."""
        if self._frequent is None:
            return None
        return ReducedVocabulary.of(torch.cat([self._frequent.to(labels.device), labels]), self._target.num_embeddings)

    def _logits(self, hidden: torch.Tensor, vocabulary: ReducedVocabulary | None) -> torch.Tensor:
        """`(n, hidden)` to `(n, V')`, scaled and capped as in decoding."""
        if vocabulary is None:
            return self._draft.compute_logits(hidden, self._target.head)
        rows = self._rows_of_head(hidden)[vocabulary.ids]
        return self._draft.compute_logits(hidden, lambda states: states.to(rows.dtype) @ rows.T)

    def _rows_of_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(V, hidden)`: what the head makes of each unit vector: its weights, also where they are quantized."""
        if self._head_rows is None:
            with torch.no_grad():
                units = torch.eye(hidden.shape[-1], device=hidden.device, dtype=hidden.dtype)
                self._head_rows = self._target.head(units).T.contiguous().to(hidden.device)
        return self._head_rows

    def _teacher(
        self, states: TargetStates, packed: PackedBlocks, learned: torch.Tensor, vocabulary: ReducedVocabulary | None
    ) -> Any:
        """Rows to the target's logits for them.

        The token at position p is predicted by the target's state at p - 1: a block with anchor 4 learns the tokens at
        5, 6, ... from the states at 4, 5, ...
        """
        if states.final is None or not self._settings.distillation:
            return None
        final = states.final.to(packed.input_ids.device)
        positions = packed.position_ids[:, packed.context_length :].view_as(learned)
        row_of, before = learned.nonzero()[:, 0], positions[learned] - 1

        @torch.no_grad()
        def logits(rows: slice) -> torch.Tensor:
            return self._logits(final[row_of[rows], before[rows]], vocabulary)

        return logits

    def _weights(self, entropy: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        """`(rows,)` weight of each learned position."""
        candidates = learned[..., 1:]
        if self._settings.weighting == "decay":
            return self._decay.to(entropy.device).expand(candidates.shape)[candidates]
        grid = torch.zeros(candidates.shape, dtype=torch.float32, device=entropy.device)
        grid[candidates] = entropy.detach().float()
        return d_pace_weights(grid, candidates, self._settings.d_pace_alpha)[candidates]

    def _reduce(self, values: torch.Tensor, weights: torch.Tensor, packed: PackedBlocks) -> torch.Tensor:
        """Weighted mean; for D-PACE the weighted sum per block, since its weights carry the expected length."""
        if self._settings.weighting == "decay":
            return (values * weights).sum() / weights.sum().clamp(min=1e-6)
        return (values * weights).sum() / (packed.anchors >= 0).sum()

    def _selector_loss(
        self,
        rows: torch.Tensor,
        labels: torch.LongTensor,
        vocabulary: ReducedVocabulary | None,
        packed: PackedBlocks,
        learned: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The selector is taught with the right predecessor: the label before, for the first candidate the anchor."""
        tokens = packed.labels.clone()
        tokens[..., 0] = packed.input_ids.view_as(tokens)[..., 0]
        previous = tokens.roll(1, dims=-1)[learned]  # learned is never at position 0, so nothing wraps around
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
        return torch.cat([entropy for entropy, _ in parts]), torch.cat([found for _, found in parts])

    @staticmethod
    def _tau(best: torch.LongTensor, packed: PackedBlocks, learned: torch.Tensor) -> float:
        """Accepted candidates per block by argmax, and the bonus token; not the walk's tau."""
        candidates = torch.full_like(packed.labels, -1)
        candidates[learned] = best
        real = packed.anchors >= 0
        return 1.0 + float(accepted_counts(candidates[..., 1:], packed.labels[..., 1:])[real].float().mean())
