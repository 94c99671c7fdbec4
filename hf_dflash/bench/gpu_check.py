"""A benchmark of minutes for a GPU: the cost of a decoding round relative to a plain token.

Uses models with random weights at the published shapes, so nothing is downloaded, and measures by block size and
context length. A random draft is never accepted, so every round commits one token and only its cost is measured. With
a trained draft, the speed-up over plain generate is tau divided by the ratio reported here.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_dflash.bench.machine import free_memory, synchronize
from hf_dflash.decoding.statistics import DFlashStatistics
from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel

TOKENS = 33
REPEATS = 3

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "taps": [1, 9, 17, 25, 33]},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "taps": [1, 9, 17, 25, 33]},
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 256,
        "taps": [0, 2],
        "mask_token_id": 255,
        "draft_layers": 1,
    },
}
QWEN3 = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "mask_token_id": 151669,
    "draft_layers": 5,
}


@dataclass(frozen=True)
class Check:
    """What to measure.

    Attributes:
        shapes: names in `SHAPES`.
        block_sizes, contexts: in tokens.
        device, dtype: of both models.
        limit: seconds after which no new cell is started.
    """

    shapes: list[str] = field(default_factory=lambda: ["qwen3-4b", "qwen3-8b"])
    block_sizes: list[int] = field(default_factory=lambda: [4, 8, 16])
    contexts: list[int] = field(default_factory=lambda: [512, 4096, 16384])
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    limit: float = 240.0


def check(plan: Check, log: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Measure as many cells as the time limit allows and return a row for each, see `_cell`.

    Raises:
        UnsupportedOptionError: unknown shape, or the device is not available.
    """
    if unknown := [name for name in plan.shapes if name not in SHAPES]:
        raise UnsupportedOptionError(f"Unknown shapes {unknown}; choose from {', '.join(SHAPES)}.")
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedOptionError("The GPU check needs a CUDA device, but torch finds none.")
    end = time.monotonic() + plan.limit
    return list(_cells(plan, end, log))


def _cells(plan: Check, end: float, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for shape in plan.shapes:
        if time.monotonic() > end:
            log(f"{shape} skipped: time limit reached")
            continue
        log(f"creating {shape} with random weights")
        target, draft = random_pair(shape, max(plan.block_sizes), plan.device, plan.dtype)
        for context in plan.contexts:
            ids = torch.randint(0, target.config.vocab_size, (1, context), device=target.device)
            plain = None
            for block_size in plan.block_sizes:
                if time.monotonic() > end:
                    log(f"{shape}, context {context}, block {block_size} skipped: time limit reached")
                    continue
                plain = plain or plain_seconds(target, ids)
                yield _cell(target, draft, ids, block_size, plain) | {"shape": shape}
        del target, draft
        free_memory()


def _cell(
    target: PreTrainedModel, draft: DFlashDraftModel, ids: torch.LongTensor, block_size: int, plain: float
) -> dict[str, Any]:
    """Measure the time of a round and of its phases, and its ratio to a plain token."""
    best: DFlashStatistics | None = None
    for _ in range(REPEATS):
        kept: list[DFlashStatistics] = []
        target.generate(
            ids, assistant_model=draft, block_size=block_size, max_new_tokens=TOKENS, do_sample=False, stats=kept.append
        )
        if best is None or _round_seconds(kept[0]) < _round_seconds(best):
            best = kept[0]
    seconds = _round_seconds(best)
    return {
        "context": ids.shape[1],
        "block_size": block_size,
        "plain_token_ms": 1000 * plain,
        "round_ms": 1000 * seconds,
        "ratio": seconds / plain,
        "phases_ms": {name: 1000 * spent / best.rounds for name, spent in best.seconds.items() if name != "prefill"},
        "rest_ms": 1000 * best.rest_seconds / best.rounds,
        "tau": best.tau,
    }


def _round_seconds(statistics: DFlashStatistics) -> float:
    return (statistics.total_seconds - statistics.seconds["prefill"]) / statistics.rounds


def plain_seconds(target: PreTrainedModel, ids: torch.LongTensor) -> float:
    """Measure seconds per plain token: the time of `TOKENS` tokens minus that of one, each the best of `REPEATS`."""

    def timed(tokens: int) -> float:
        times = []
        for _ in range(REPEATS):
            synchronize(target.device)
            start = time.perf_counter()
            target.generate(ids, max_new_tokens=tokens, do_sample=False)
            synchronize(target.device)
            times.append(time.perf_counter() - start)
        return min(times)

    return (timed(TOKENS) - timed(1)) / (TOKENS - 1)


def random_pair(
    shape: str, block_size: int, device: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """Create a Qwen3 target (without EOS token) and a draft, both with random weights."""
    sizes = {**QWEN3, **SHAPES[shape]}
    taps, mask, draft_layers = sizes.pop("taps"), sizes.pop("mask_token_id"), sizes.pop("draft_layers")
    rope = {"rope_type": "default", "rope_theta": 1e6}
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3", **sizes, rope_parameters=rope, tie_word_embeddings=False), dtype=dtype
        ).eval()
        config = DFlashConfig(
            **{**sizes, "num_hidden_layers": draft_layers},
            dflash_version=1,
            rope_parameters=rope,
            block_size=block_size,
            mask_token_id=mask,
            target_layer_ids=taps,
            layer_types=["full_attention"] * draft_layers,
            layer_causal=[False] * draft_layers,
        )
        draft = DFlashDraftModel(config).to(dtype).eval()
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target, draft


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    head = "| shape | context | block | plain token, ms | round, ms | round / plain token | propose | verify |"
    lines = [head, "|" + " --- |" * 8]
    for row in rows:
        values = [
            row["plain_token_ms"],
            row["round_ms"],
            row["ratio"],
            *map(row["phases_ms"].get, ("propose", "verify")),
        ]
        cells = [row["shape"], str(row["context"]), str(row["block_size"]), *(f"{value:.2f}" for value in values)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
