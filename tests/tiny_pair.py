"""Writes a tiny target with a tokenizer and a tiny draft to folders, for the tests of the command line."""

from pathlib import Path
from typing import NamedTuple

import torch
from tiny_drafts import tiny_draft
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|mask|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if not brief %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Folders(NamedTuple):
    target: str
    draft: str


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and a few special ones: 261 of the model's 264 vocabulary entries."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


def write_tiny_pair(folder: Path) -> Folders:
    """Write the target (float32 Llama, hidden 64, 4 layers) and a draft that pairs with it."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=264,
        max_position_embeddings=512,
        # Weights wide enough for varied text; at the default 0.02 a random model repeats one token.
        initializer_range=0.6,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    folders = Folders(str(folder / "target"), str(folder / "draft"))
    LlamaForCausalLM(config).save_pretrained(folders.target)
    tokenizer.save_pretrained(folders.target)
    tiny_draft(vocab_size=264, mask_token_id=tokenizer.convert_tokens_to_ids("<|mask|>")).save_pretrained(folders.draft)
    return folders
