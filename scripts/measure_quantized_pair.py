"""Measure SmolLM2-135M-Instruct quantized in several ways, with its draft: chat prompts, greedy.

    python scripts/measure_quantized_pair.py [--prompts 6] [--tokens 64] [--draft FOLDER] [dense awq nf4 int8]

For each target: texts equal to plain generate, tau, and speed-up, both methods taking turns in one process. Records go
to docs/data/quantized-smollm2.json; scripts/make_quantized_table.py puts them into the pages.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make_quantized_table import PAIR_FILE, store, versions
from transformers import AutoModelForCausalLM, AutoTokenizer, AwqConfig, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import logging

from hf_dflash import load_draft
from hf_dflash.decoding.comparison import compare_texts
from hf_dflash.prompts import load_prompts
from hf_dflash.smollm2 import demo_draft, demo_target

GROUP = 64


def loaded(dtype: torch.dtype, config: Any = None) -> Callable[[Path], PreTrainedModel]:
    """Load the checkpoint, quantizing it on the way if a configuration says so."""
    return lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def rounded_to_awq(folder: Path) -> PreTrainedModel:
    """Round the checkpoint to AWQ's 4 bits, to the nearest level, and load that in float16."""
    from awq import save_awq

    with tempfile.TemporaryDirectory() as place:
        save_awq(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), Path(place), GROUP)
        config = AwqConfig(bits=4, group_size=GROUP, backend="torch_awq")
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float16, quantization_config=config)


BFLOAT16 = torch.bfloat16
TARGETS: dict[str, tuple[str, tuple[str, ...], Callable[[Path], PreTrainedModel]]] = {
    "dense": ("not quantized", (), loaded(BFLOAT16)),
    "awq": (f"AWQ, groups of {GROUP}, rounded to nearest", ("gptqmodel",), rounded_to_awq),
    "nf4": (
        "bitsandbytes nf4",
        ("bitsandbytes",),
        loaded(
            BFLOAT16, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BFLOAT16)
        ),
    ),
    "int8": ("bitsandbytes int8", ("bitsandbytes",), loaded(BFLOAT16, BitsAndBytesConfig(load_in_8bit=True))),
}


def measure(target: PreTrainedModel, tokenizer: Any, draft: Any, prompts: int, tokens: int) -> dict[str, Any]:
    """Decode each prompt with and without the draft, swapping the order from prompt to prompt."""
    seconds, forwards, written = {"plain": 0.0, "dflash": 0.0}, 0, 0
    same = explained = 0
    for number, prompt in enumerate(load_prompts("chat")[:prompts]):
        inputs = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = {"max_new_tokens": tokens, "do_sample": False}
        statistics, texts = [], {}
        extra = {"plain": {}, "dflash": {"assistant_model": draft, "stats": statistics.append}}
        for name in sorted(extra, reverse=number % 2 == 0):
            start = time.perf_counter()
            texts[name] = target.generate(**inputs, **options, **extra[name])[0]
            seconds[name] += time.perf_counter() - start
        found = compare_texts(target, inputs, texts["plain"], texts["dflash"], **options)
        same, explained = same + found.same, explained + found.within_tolerance
        written += statistics[0].new_tokens - 1  # the prefill writes one without a round
        forwards += statistics[0].rounds
    return {
        "texts": prompts,
        "same": same,
        "explained": explained,
        "tau": written / forwards,
        "ratio": seconds["plain"] / seconds["dflash"],
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft", type=Path, help="default: the shipped one")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    folder = demo_target(lambda text: print(text, file=sys.stderr))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = load_draft(arguments.draft or demo_draft())
    for name in arguments.targets or TARGETS:
        title, packages, load = TARGETS[name]
        target = load(folder).eval()
        record = {"title": title, "dtype": str(target.dtype).removeprefix("torch."), "packages": versions(packages)}
        record |= measure(target, tokenizer, draft, arguments.prompts, arguments.tokens)
        store(PAIR_FILE, name, record)
        print(name, record, flush=True)


if __name__ == "__main__":
    main()
