"""A real grammar library: xgrammar's processor advances its matcher, so it must only see committed tokens."""

import json

import pytest
import torch
from families import FAMILIES
from lossless import assert_same, both, fresh
from oracle import fixed, randomly
from transformers import LogitsProcessorList

xgrammar = pytest.importorskip("xgrammar")
huggingface = pytest.importorskip("xgrammar.contrib.hf")

#: One token per character that can occur in JSON of the schema below; the target's other ids are unused.
CHARACTERS = [*'{}[]":, ', *"abcdefghijklmnopqrstuvwxyz", *"0123456789", "-", "."]
EOS = 383
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
}


def grammar():
    vocabulary = CHARACTERS + [f"<{i}>" for i in range(len(CHARACTERS), 384)]
    tokens = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=384, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(tokens).compile_json_schema(json.dumps(SCHEMA))


@pytest.mark.parametrize(
    "mode", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(
    "pattern", [fixed(0), fixed(2), fixed(5), randomly(1, 5)], ids=["none", "two", "all", "random"]
)
def test_json_with_a_grammar(pattern, mode):
    target, compiled = FAMILIES["llama"].build(0), grammar()
    start = torch.tensor([[CHARACTERS.index(letter) for letter in "json:"]])

    @fresh
    def processors():
        return LogitsProcessorList([huggingface.LogitsProcessor(compiled)])

    options = {"logits_processor": processors, "max_new_tokens": 48, "eos_token_id": EOS, "pad_token_id": EOS}
    pair = both(target, {"inputs": start}, pattern, **options, **mode)
    assert_same(pair)
    text = "".join(CHARACTERS[i] for i in pair.ours[0, 5:].tolist() if i < len(CHARACTERS))
    assert text.startswith('{"name"') and len(set(text)) > 6
