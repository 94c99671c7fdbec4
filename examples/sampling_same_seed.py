"""Sampling: the same seed gives the same text, with and without the draft.

In float32 this holds token for token. In bfloat16 two texts may diverge at a token whose top two choices are within
numerical tolerance.

python examples/sampling_same_seed.py [TARGET DRAFT]     default: SmolLM2-135M-Instruct and the draft of this repository
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflash

TARGET, DRAFT = sys.argv[1:3] or (hf_dflash.demo_target(log=print), hf_dflash.demo_draft())

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, device_map="auto")
draft = hf_dflash.load_draft(DRAFT, device_map=target.device)
inputs = tokenizer("Once upon a time, there was a", return_tensors="pt").to(target.device)
options = {"max_new_tokens": 32, "do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}

for seed in (1, 2):
    torch.manual_seed(seed)
    plain = target.generate(**inputs, **options)
    torch.manual_seed(seed)
    drafted = target.generate(**inputs, **options, assistant_model=draft)
    print(f"seed {seed}: same text: {torch.equal(plain, drafted)}\n{tokenizer.decode(drafted[0])}\n")
    assert torch.equal(plain, drafted)
