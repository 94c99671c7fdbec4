"""A streamed chat of two turns with one cache: the second turn prefills only the new tokens.

python examples/streaming_chat.py [TARGET DRAFT]     default: SmolLM2-135M-Instruct and the draft of this repository
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

import hf_dflash
from hf_dflash import CACHE_KEYWORD

TARGET, DRAFT = sys.argv[1:3] or (hf_dflash.demo_target(log=print), hf_dflash.demo_draft())
TURNS = ["What is a hash table?", "Name one use of it."]

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto", device_map="auto")
draft = hf_dflash.load_draft(DRAFT, device_map=target.device)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

messages, cache, previous = [], None, None
for turn in TURNS:
    print(f"> {turn}")
    messages.append({"role": "user", "content": turn})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(target.device)
    # Reuse the cache only if the new prompt starts with exactly the cached tokens. Decoding an answer and tokenizing it
    # again can give different tokens; then start from scratch.
    length = cache.get_seq_length() if cache is not None else 0
    if not length or not torch.equal(inputs["input_ids"][0, :length], previous[:length]):
        cache = DynamicCache(config=target.config)
    output = target.generate(
        **inputs,
        # `past_key_values` before transformers 5.24, `cache` since then. The draft's context is kept with it.
        **{CACHE_KEYWORD: cache},
        assistant_model=draft,
        streamer=streamer,
        max_new_tokens=48,
        do_sample=False,
    )
    print(f"({length} tokens were in the cache)")
    previous = output[0]
    answer = tokenizer.decode(previous[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
