"""Runs plain generate and DFlash generate (with an oracle draft) from the same random state, and asserts that their
outputs are the same.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import Pattern, fixed, none_right, oracle_draft, randomly

from hf_dflash.decoding.statistics import DFlashStatistics

BLOCK = 6
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 0},
}
PATTERNS: dict[str, Pattern] = {
    "none": none_right,
    **{f"fixed{k}": fixed(k) for k in range(1, BLOCK - 1)},
    "all": fixed(BLOCK - 1),
    "random": randomly(11, BLOCK - 1),
}


def prompt(length: int = 9, seed: int = 0, low: int = 5, high: int = 300) -> torch.LongTensor:
    """Return `(1, length)` random ids; the global random state is left unchanged."""
    return torch.randint(low, high, (1, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Pair:
    """The outputs of plain generate and DFlash generate, and the statistics of the latter."""

    plain: Any
    ours: Any
    statistics: DFlashStatistics


def both(
    target,
    inputs: dict,
    pattern: Pattern,
    seed: int = 0,
    block_size: int = BLOCK,
    wrong: int | None = None,
    trace: Path | None = None,
    **options,
) -> Pair:
    """Run plain generate, then the oracle that knows its text, from the same seed; `wrong` is its wrong candidate.

    Stateful options are passed as functions marked with `fresh`, so that each run gets a new one.
    """

    def run(**more):
        torch.manual_seed(seed)
        fresh = {name: make() if getattr(make, "makes_fresh", False) else make for name, make in options.items()}
        return target.generate(**inputs, **fresh, **more)

    plain = run()
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    mask = inputs.get("attention_mask")
    references = [unpadded(row, None if mask is None else mask[i]) for i, row in enumerate(sequences)]
    draft = oracle_draft(target, references, pattern, block_size=block_size, wrong=wrong)
    statistics: list[DFlashStatistics] = []
    ours = run(assistant_model=draft, stats=statistics.append, trace=trace)
    return Pair(plain, ours, statistics[0])


def fresh(make):
    """Mark a function that makes a new value of an option for each run."""
    make.makes_fresh = True
    return make


def unpadded(row: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A row without its left padding."""
    return row if mask is None else row[int((mask == 0).sum()) :]


def assert_same(pair: Pair) -> None:
    """Assert the same ids and, if outputs were requested, the same records."""
    if isinstance(pair.plain, torch.Tensor):
        assert pair.plain.tolist() == pair.ours.tolist()
        return
    assert pair.plain.sequences.tolist() == pair.ours.sequences.tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_close(getattr(pair.plain, name), getattr(pair.ours, name), name)


#: In float32 a block is summed in a different order than single tokens. The wide initial weights of the tiny targets
#: amplify that to at most 1e-4 of the largest value (attention after a softmax); a value from another position is off
#: by about as much as the largest value itself.
ROUNDING = 5e-4


def is_close(plain: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether shapes and infinities match and finite values are within `ROUNDING` of the largest."""
    if plain.shape != ours.shape or not torch.equal(plain.isfinite(), ours.isfinite()):
        return False
    plain, ours = plain[plain.isfinite()], ours[ours.isfinite()]
    return bool((plain - ours).abs().max() <= ROUNDING * plain.abs().max())


def assert_close(plain: Any, ours: Any, where: str) -> None:
    """Assert that nested tuples of tensors have the same structure and close values."""
    if plain is None or isinstance(plain, torch.Tensor):
        assert (plain is None) == (ours is None), where
        assert plain is None or is_close(plain, ours), f"{where}: shapes {tuple(plain.shape)}, {tuple(ours.shape)}"
        return
    assert len(plain) == len(ours), f"{where}: {len(plain)} and {len(ours)} entries"
    for index, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert_close(a, b, f"{where}[{index}]")


def assert_varied(ids: torch.Tensor, new_tokens: int) -> None:
    """Assert that the text does not repeat a handful of tokens, which would hide rollback bugs."""
    distinct = ids[0, -new_tokens:].unique().numel()
    assert distinct >= new_tokens // 2, f"only {distinct} distinct tokens in {new_tokens}: the fixture proves nothing"
