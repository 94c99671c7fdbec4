"""Measure exactness and acceptance of a real pair: plain generate, ours and the authors' loop, prompt by prompt.

    python scripts/measure_exactness.py --draft FOLDER --out proof.jsonl --dtype float32 --prompts 40 --new-tokens 256

Writes one JSON line per prompt: whether the texts are equal, or where they first differ and the top two logits there;
the tokens committed by each round, ours and the authors' (package `dflash`). An interrupted run resumes where the file
ends. Timing is left to `hf-dflash bench`.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from unittest.mock import patch

import torch

from hf_dflash.draft.loading import load_draft
from hf_dflash.pair import Pair, encode, load_target
from hf_dflash.prompts import load_prompts
from hf_dflash.smollm2 import demo_target


def prompts(pair: Pair, count: int) -> list[tuple[str, torch.Tensor]]:
    """Half HumanEval, half everyday questions, through the chat template: (name, `(1, length)` ids)."""
    chosen = [*load_prompts(f"humaneval:{count // 2}"), *load_prompts(f"chat:{count - count // 2}")]
    return [(prompt.name, encode(pair, prompt.messages)["input_ids"]) for prompt in chosen]


@functools.cache
def authors_draft(folder: str, dtype: torch.dtype):
    """The same checkpoint, loaded by the authors' package."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    version = load_draft(folder).config.dflash_version
    return (DFlash2DraftModel if version == 2 else DFlashDraftModel).from_pretrained(folder, dtype=dtype).eval()


def authors_rounds(folder: str, target, ids: torch.Tensor, new_tokens: int, eos: list[int], dtype) -> tuple[list, list]:
    """The authors' loop on the same pair: its new tokens and the number of tokens per round."""
    from dflash import model

    # Their clock synchronizes with a CUDA device, which a CPU-only machine does not have.
    with patch.object(model, "_cuda_time", time.perf_counter):
        draft = authors_draft(folder, dtype)
        result = model.dflash_generate(draft, target, ids, new_tokens, eos, return_stats=True)
    return result.output_ids[0, ids.shape[1] :].tolist(), result.acceptance_lengths


def measure(target, draft, folder: str | None, ids: torch.Tensor, new_tokens: int) -> dict:
    """Compare the texts of one prompt; without a folder the authors' loop is skipped."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = target.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    statistics = []
    ours = target.generate(ids, **options, assistant_model=draft, stats=statistics.append)[0]
    text = plain.sequences[0]
    shared = min(len(text), len(ours))
    differing = (text[:shared] != ours[:shared]).nonzero()
    line = {
        "new_tokens": len(ours) - ids.shape[1],
        "committed": statistics[0].committed,
        "equal": torch.equal(text, ours),
    }
    if not line["equal"]:
        first = int(differing[0]) - ids.shape[1] if len(differing) else shared - ids.shape[1]
        best, second = plain.logits[first][0].topk(2).values.tolist()
        line |= {"first_difference": first, "best": best, "second": second}
    if folder is None:
        return line
    eos = torch.tensor([target.generation_config.eos_token_id]).flatten().tolist()
    authors, rounds = authors_rounds(folder, target, ids, new_tokens, eos, draft.dtype)
    return line | {"authors_equal_ours": authors == ours[ids.shape[1] :].tolist(), "authors_committed": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--without-authors", action="store_true")
    arguments = parser.parse_args()

    dtype = getattr(torch, arguments.dtype)
    folder = str(demo_target(print))
    target, tokenizer = load_target(folder, dtype=arguments.dtype, device_map="cpu")
    draft = load_draft(arguments.draft, dtype=dtype)
    pair = Pair(target, tokenizer, draft, folder, arguments.draft)
    authors = None if arguments.without_authors else arguments.draft
    done = set()
    if arguments.out.exists():
        done = {json.loads(line)["prompt"] for line in arguments.out.read_text().splitlines()}
    with arguments.out.open("a") as out:
        for name, ids in prompts(pair, arguments.prompts):
            if name not in done:
                line = measure(target, draft, authors, ids, arguments.new_tokens)
                out.write(json.dumps({"prompt": name, "dtype": arguments.dtype, **line}) + "\n")
                out.flush()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    tau = sum(sum(line["committed"]) for line in lines) / sum(len(line["committed"]) for line in lines)
    same_rounds = sum(line["committed"] == line.get("authors_committed") for line in lines)
    equal = sum(line["equal"] for line in lines)
    print(
        f"{len(lines)} prompts: {equal} equal to plain generate, tau {tau:.3f}, {same_rounds} with the authors' rounds"
    )


if __name__ == "__main__":
    main()
