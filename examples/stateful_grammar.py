"""A stateful logits processor: it gets exactly the same calls as without the draft.

The grammar is small: a list of numbers in brackets, such as `[12, 7, 305]`. Like a grammar engine, the processor keeps
its state from call to call, so it would break if it ever saw a token that is not committed.

python examples/stateful_grammar.py [TARGET DRAFT]     default: SmolLM2-135M-Instruct and the draft of this repository
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

import hf_dflash

TARGET, DRAFT = sys.argv[1:3] or (hf_dflash.demo_target(log=print), hf_dflash.demo_draft())


class NumberList(LogitsProcessor):
    """Allows `[`, then numbers separated by `, `, then `]` and EOS."""

    def __init__(self, tokenizer, prompt_length: int):
        pieces = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
        self.digits = [i for i, piece in pieces.items() if piece.isdecimal() and piece.isascii()]
        self.commas = [i for i, piece in pieces.items() if piece == ","]
        self.spaces = [i for i, piece in pieces.items() if piece == " "]
        self.opening = [i for i, piece in pieces.items() if piece == "["]
        self.closing = [i for i, piece in pieces.items() if piece == "]"]
        self.end = [tokenizer.eos_token_id]
        self.state, self.numbers, self.seen = "start", 0, prompt_length

    def allowed(self) -> list[int]:
        return {
            "start": self.opening,
            "first": self.digits,
            "number": self.digits + (self.closing if self.numbers >= 4 else self.commas),
            "comma": self.spaces,
            "closed": self.end,
        }[self.state]

    def advance(self, token: int) -> None:
        assert token in self.allowed(), "got a token that the grammar does not allow"
        if token in self.digits:
            self.numbers += self.state == "first"
            self.state = "number"
        else:
            kinds = [(self.opening, "first"), (self.commas, "comma"), (self.spaces, "first"), (self.closing, "closed")]
            self.state = next(state for tokens, state in kinds if token in tokens)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        new = input_ids[0, self.seen :].tolist()
        assert len(new) <= 1, "plain generate calls the processor once per token"
        for token in new:
            self.advance(token)
        self.seen = input_ids.shape[1]
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed()] = scores[:, self.allowed()]
        return masked


tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, device_map="auto")
draft = hf_dflash.load_draft(DRAFT, device_map=target.device)
inputs = tokenizer("Some prime numbers: ", return_tensors="pt").to(target.device)

texts = []
for assistant in (None, draft):
    grammar = LogitsProcessorList([NumberList(tokenizer, inputs["input_ids"].shape[1])])
    options = {"assistant_model": assistant} if assistant is not None else {}
    output = target.generate(**inputs, logits_processor=grammar, max_new_tokens=32, do_sample=False, **options)
    texts.append(tokenizer.decode(output[0], skip_special_tokens=True))
    print("with the draft:   " if assistant is not None else "without the draft:", texts[-1])
assert texts[0] == texts[1]
