"""An AWQ target with a bfloat16 draft: the draft is loaded as usual, only the target is quantized.

Needs the `awq` extra (gptqmodel) and the name of an AWQ checkpoint:

python examples/awq_target.py Qwen/Qwen3-8B-AWQ z-lab/Qwen3-8B-DFlash-b16
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dflash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("target", help="an AWQ checkpoint")
parser.add_argument("draft", help="the draft of the unquantized target")
names = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(names.target)
# AWQ kernels compute in float16. The draft must not: it stays in bfloat16, and tensors are cast in between.
target = AutoModelForCausalLM.from_pretrained(names.target, dtype=torch.float16, device_map="auto")
draft = hf_dflash.load_draft(names.draft, device_map=target.device)

messages = [{"role": "user", "content": "Explain what a semaphore is."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(target.device)
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=256, return_dict_in_generate=True)
print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\n{target.dtype} target, {draft.dtype} draft, tau {output.dflash_stats.tau:.2f}")
