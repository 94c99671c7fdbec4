"""Two turns of a chat, streamed, on one cache: the second turn reads only what is new.

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

messages, cache, read = [], None, None
for turn in TURNS:
    print(f"> {turn}")
    messages.append({"role": "user", "content": turn})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(target.device)
    # A cache may go on only if the new prompt begins with the very tokens that it has read. An answer that is rendered
    # back to text and tokens can come out otherwise; then everything is read anew.
    length = cache.get_seq_length() if cache is not None else 0
    if not length or not torch.equal(inputs["input_ids"][0, :length], read[:length]):
        cache = DynamicCache(config=target.config)
    output = target.generate(
        **inputs,
        # `past_key_values` in transformers before 5.24, `cache` from there on. The draft's context stays with it.
        **{CACHE_KEYWORD: cache},
        assistant_model=draft,
        streamer=streamer,
        max_new_tokens=48,
        do_sample=False,
    )
    print(f"({length} tokens were in the cache)")
    read = output[0]
    answer = tokenizer.decode(read[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
