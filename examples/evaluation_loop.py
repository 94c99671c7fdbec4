"""A simple evaluation loop: answer a prompt set, store the answers, compare with plain decoding.

The answers are the target's own, so an evaluation gives the same score with a draft as without, only faster.

python examples/evaluation_loop.py [--target T --draft D] [--prompts chat:4] [--tokens 32] [--out answers.jsonl]
"""

import argparse
import json

from hf_dflash import compare, demo_draft, demo_target, encode, load_pair, load_prompts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=None)
parser.add_argument("--draft", default=None)
parser.add_argument("--prompts", default="chat:4", help="chat, humaneval, gsm8k ... or a JSONL file")
parser.add_argument("--tokens", type=int, default=32)
parser.add_argument("--out", default=None, help="JSONL file for the answers")
chosen = parser.parse_args()

pair = load_pair(chosen.target or str(demo_target(log=print)), chosen.draft or str(demo_draft()))
answers = []
for prompt in load_prompts(chosen.prompts):
    inputs = encode(pair, prompt.messages)
    options = {"max_new_tokens": chosen.tokens, "do_sample": False}
    ids = pair.target.generate(**inputs, **options, assistant_model=pair.draft)
    text = pair.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    same = compare(pair.target, pair.draft, inputs, **options).same
    answers.append({"name": prompt.name, "answer": text, "same_as_plain": same})
    print(f"{prompt.name}: {text[:60]!r}... same as plain: {same}")
if chosen.out:
    with open(chosen.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(answer) + "\n" for answer in answers)
