"""Quickstart: load a pair, generate, look at the statistics.

python examples/quickstart.py [TARGET DRAFT]     default: SmolLM2-135M-Instruct and the draft of this repository
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflash

TARGET, DRAFT = sys.argv[1:3] or (hf_dflash.demo_target(log=print), hf_dflash.demo_draft())

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto", device_map="auto")
draft = hf_dflash.load_draft(DRAFT, device_map=target.device)

messages = [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(target.device)
output = target.generate(
    **inputs, assistant_model=draft, max_new_tokens=64, do_sample=False, return_dict_in_generate=True
)
print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

stats = output.dflash_stats
print(f"\n{stats.new_tokens} tokens in {stats.rounds} rounds, {stats.tau:.2f} tokens per forward of the target")
