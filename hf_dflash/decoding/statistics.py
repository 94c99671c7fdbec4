"""Metrics of a call: statistics, the trace of its rounds, and the output class that holds them.

Every metric is defined here. A *round* is one verify forward of the target. A round *commits* its accepted candidates
and one bonus token, or fewer if a stop cuts it.

- acceptance length tau = committed tokens / rounds (1 for plain decoding; the token from the prefill is not counted);
- acceptance rate alpha = accepted candidates / proposed candidates;
- acceptance by position i (1-based) = rounds that accepted at least i candidates / rounds that proposed at least i;
- seconds by phase: prefill, propose, verify, accept, commit; `rest` is the time the call spent outside of them;
- peak draft bytes: the largest total size of the draft's context cache and the taps still to be fused.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dflash.logs import get_logger

logger = get_logger(__name__)

PHASES = ("prefill", "propose", "verify", "accept", "commit")

LOW_ACCEPTANCE_ROUNDS = 32
LOW_ACCEPTANCE_TAU = 1.1


@dataclass
class DFlashStatistics:
    """Metrics of one `generate` call, summed over the rows of a batch. See the module docstring for definitions.

    Attributes:
        proposed, accepted, committed: one entry per round, in tokens.
        prefills: prompts processed (rows of the batch).
        seconds: wall-clock seconds by phase. On a GPU they are exact only with `synchronize`, which is set if the call
            passes `stats=` or `trace=`; otherwise the phase that waits for the device also includes the time of the
            phases before it.
        total_seconds: wall-clock seconds of decoding, prefill included.
        peak_draft_bytes: see the module docstring.
    """

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    prefills: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    total_seconds: float = 0.0
    peak_draft_bytes: int = 0
    synchronize: bool = field(default=False, repr=False)

    @property
    def rounds(self) -> int:
        """Verify forwards of the target."""
        return len(self.committed)

    @property
    def new_tokens(self) -> int:
        """Generated tokens, including the ones from the prefill."""
        return sum(self.committed) + self.prefills

    @property
    def tau(self) -> float:
        """Acceptance length: committed tokens per round; NaN before the first round."""
        return sum(self.committed) / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted candidates over proposed candidates; NaN if none was proposed."""
        return sum(self.accepted) / sum(self.proposed) if sum(self.proposed) else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry i - 1: fraction of the rounds with at least i candidates that accepted at least i."""
        shares = []
        for position in range(1, max(self.proposed, default=0) + 1):
            tried = sum(n >= position for n in self.proposed)
            shares.append(sum(n >= position for n in self.accepted) / tried)
        return shares

    @property
    def histogram(self) -> list[int]:
        """Entry k: number of rounds that accepted exactly k candidates."""
        return [self.accepted.count(k) for k in range(max(self.proposed, default=0) + 1)]

    @property
    def rest_seconds(self) -> float:
        """Seconds of the call outside every phase."""
        return self.total_seconds - sum(self.seconds.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a phase."""
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - start

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Add the time of the `with` block to the call's total."""
        start = self._now()
        try:
            yield
        finally:
            self.total_seconds += self._now() - start

    def _now(self) -> float:
        if self.synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def add_round(self, proposed: int, accepted: int, committed: int, draft_bytes: int) -> None:
        """Record one round."""
        self.proposed.append(proposed)
        self.accepted.append(accepted)
        self.committed.append(committed)
        self.peak_draft_bytes = max(self.peak_draft_bytes, draft_bytes)
        if self.rounds == LOW_ACCEPTANCE_ROUNDS and self.tau < LOW_ACCEPTANCE_TAU:
            logger.warning(
                f"Almost none of the draft's candidates are accepted: {self.tau:.2f} tokens per target forward over "
                f"{self.rounds} rounds, so decoding is slower than without the draft (the output is still correct). "
                "Common causes: the draft was trained for another target or another version of it; thinking mode is "
                "on but the draft was trained with it off (or vice versa); the prompt does not use the chat template "
                "the draft was trained with; the draft was converted to float16 or quantized to 4 bits; the target "
                "overflows in float16; the block size is much too large for this text."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return all metrics as JSON-serializable values."""
        return {
            "rounds": self.rounds,
            "new_tokens": self.new_tokens,
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "histogram": self.histogram,
            "committed": self.committed,
            "seconds": {**self.seconds, "rest": self.rest_seconds, "total": self.total_seconds},
            "peak_draft_bytes": self.peak_draft_bytes,
        }


class RoundTrace:
    """A JSON-lines file with one line per round: row, round, anchor, candidates, accepted, committed ids.

    Args:
        path: file to append to, so several calls can share it. None writes nothing.
    """

    def __init__(self, path: str | Path | None):
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> "RoundTrace":
        if self._path is not None:
            self._file = open(self._path, "a", encoding="utf-8")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(
        self, row: int, round_index: int, block: torch.LongTensor, accepted: int, committed: torch.LongTensor
    ) -> None:
        """Write one round: `block` `(n,)` is the anchor and the candidates, `committed` `(m,)` the committed ids."""
        if self._file is None:
            return
        anchor, *candidates = block.tolist()
        line = {
            "row": row,
            "round": round_index,
            "anchor": anchor,
            "candidates": candidates,
            "accepted": accepted,
            "committed": committed.tolist(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclass
class DFlashOutput(GenerateDecoderOnlyOutput):
    """Plain generate's output plus the statistics of the call.

    Args:
        dflash_stats: metrics of the call; all other fields are those of plain generate.
    """

    dflash_stats: DFlashStatistics | None = None
