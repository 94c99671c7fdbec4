"""The tiny trained pairs: real acceptance on held-out text, and the same text as without the draft."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash.decoding.generate import DFlashGenerate
from hf_dflash.draft.loading import load_draft
from hf_dflash.target.target import Target
from hf_dflash.training import measure_acceptance

PAIRS = Path(__file__).parent / "data" / "pairs"


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def pair(request):
    folder = PAIRS / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    return target, load_draft(folder / "draft", dtype=torch.float32)


def held_out_prompts(count):
    return torch.tensor(json.loads((PAIRS / "held_out.json").read_text())[:count])


def greedy(target, prompts, **options):
    mask = torch.ones_like(prompts)
    return target.generate(prompts, attention_mask=mask, max_new_tokens=64, do_sample=False, **options)


def until_end(ids):
    return ids[: ids.index(0) + 1] if 0 in ids else ids


def test_held_out_text_is_varied_and_well_accepted(pair):
    target, draft = pair
    prompts = held_out_prompts(8)
    responses = [until_end(row) for row in greedy(target, prompts)[:, 24:].tolist()]
    assert sum(len(set(row)) for row in responses) / 8 > 15
    measured = measure_acceptance(draft, Target(target), zip(prompts.tolist(), responses, strict=True))
    assert measured.tau >= 2
    assert measured.by_position == sorted(measured.by_position, reverse=True)


def test_decoding_with_the_draft_changes_nothing_but_the_rounds(pair):
    target, draft = pair
    collected = []
    for prompt in held_out_prompts(3)[:, None]:
        fast = greedy(target, prompt, custom_generate=DFlashGenerate(draft, stats=collected.append))
        assert torch.equal(greedy(target, prompt), fast)
    assert sum(sum(stats.committed) for stats in collected) >= 1.8 * sum(stats.rounds for stats in collected)


def test_files_are_small_and_the_tokenizer_is_shared(pair):
    target, draft = pair
    assert all(path.stat().st_size <= 4 * 2**20 for path in PAIRS.rglob("*") if path.is_file())
    tokenizer = AutoTokenizer.from_pretrained(PAIRS / "dense" / "target")
    text = "def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert draft.config.mask_token_id == tokenizer.convert_tokens_to_ids("<|mask|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
