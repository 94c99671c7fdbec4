"""Measure what a round costs as the context grows: plain generate, the authors' loop, transformers' native path, ours.

    python scripts/measure_contexts.py --draft FOLDER --contexts 128 2048 7900 --out contexts.json

The methods take turns in one process. Time counts from the end of the prefill to the end of the call; medians and
spread are over the repeats. Methods that cannot run the draft are skipped.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

from hf_dflash.bench.methods import MethodUnavailable, make_method
from hf_dflash.draft.loading import load_draft
from hf_dflash.pair import Pair, load_target, sampling_arguments
from hf_dflash.smollm2 import demo_target

METHODS = ("plain", "authors", "native", "dflash")


def prompt(tokenizer, length: int) -> torch.LongTensor:
    """`(1, length)` ids: a chat whose user pastes that much of Python's manual and asks for a summary."""
    manual = tokenizer("\n\n".join(topics.values()))["input_ids"]
    frame = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Sum this up:\n"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    # The pasted text goes before the end of the user's turn: the last 5 tokens of the frame close it and open the
    # answer.
    return torch.tensor([[*frame[:-5], *manual[: length - len(frame)], *frame[-5:]]])


def timed(method, target, ids: torch.LongTensor, new_tokens: int) -> dict:
    """One call: tokens and target forwards after the prefill, and their seconds."""
    ends = []
    handle = target.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        arguments = {**sampling_arguments(0.0), "max_new_tokens": new_tokens}
        text, metrics = method.decode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, arguments)
    finally:
        handle.remove()
    seconds = time.perf_counter() - ends[0]
    line = {"tokens": text.shape[1] - ids.shape[1] - 1, "rounds": len(ends) - 1, "seconds": seconds}
    if metrics is not None:
        line["phases"] = {**metrics.seconds, "rest": metrics.rest_seconds}
    return line


def summary(runs: dict[str, list[dict]]) -> dict:
    """Per method: median milliseconds per round, their spread, and the speed-up over plain."""
    per_token = {name: [run["seconds"] / run["tokens"] for run in lines] for name, lines in runs.items()}
    table = {}
    for name, lines in runs.items():
        rounds = [1e3 * run["seconds"] / run["rounds"] for run in lines]
        ratios = [plain / own for plain, own in zip(per_token["plain"], per_token[name], strict=True)]
        table[name] = {
            "round_ms": {"median": statistics.median(rounds), "min": min(rounds), "max": max(rounds)},
            "speed_up": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            "tau": sum(run["tokens"] for run in lines) / sum(run["rounds"] for run in lines),
        }
        if "phases" in lines[0]:
            # The prefill is outside the measured time.
            totals = {phase: sum(run["phases"][phase] for run in lines) for phase in lines[0]["phases"]}
            whole = sum(seconds for phase, seconds in totals.items() if phase != "prefill")
            table[name]["share"] = {p: seconds / whole for p, seconds in totals.items() if p != "prefill"}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 7900])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()

    folder = str(demo_target(print))
    target, tokenizer = load_target(folder, dtype=arguments.dtype, device_map="cpu")
    draft = load_draft(arguments.draft, dtype=getattr(torch, arguments.dtype))
    pair = Pair(target, tokenizer, draft, folder, arguments.draft)
    methods = {}
    for name in METHODS:
        try:
            methods[name] = make_method(name, pair)
        except MethodUnavailable as reason:
            print(f"{name} is skipped: {reason}")
    results = {"threads": torch.get_num_threads(), "new_tokens": arguments.new_tokens, "contexts": {}}
    for length in arguments.contexts:
        ids = prompt(tokenizer, length)
        for method in methods.values():
            timed(method, target, ids[:, -64:], 8)
        runs: dict[str, list[dict]] = {name: [] for name in methods}
        for _ in range(arguments.repeats):
            for name, method in methods.items():
                runs[name].append(timed(method, target, ids, arguments.new_tokens))
        results["contexts"][length] = {"table": summary(runs), "runs": runs}
        arguments.out.write_text(json.dumps(results, indent=1))
        for name, row in results["contexts"][length]["table"].items():
            cost, speed_up = row["round_ms"], row["speed_up"]
            print(
                f"{length:>5} {name:<8} round {cost['median']:7.1f} ms ({cost['min']:.1f}..{cost['max']:.1f}), ",
                f"speed-up {speed_up['median']:.2f} ({speed_up['min']:.2f}..{speed_up['max']:.2f}), ",
                f"tau {row['tau']:.2f}",
                sep="",
                flush=True,
            )


if __name__ == "__main__":
    main()
