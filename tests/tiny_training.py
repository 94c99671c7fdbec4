"""A target, texts and settings so small that a training run takes seconds.

The target's random weights have a large enough range for its text to be varied.
"""

import json
from pathlib import Path

import torch
import transformers

from hf_dflash.training.settings import TrainingSettings

VOCABULARY, LAYERS = 96, 6


def tiny_target(seed: int = 0, **changes) -> transformers.LlamaForCausalLM:
    """A random Llama in float32; ids 0 and 1 are EOS and padding."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "initializer_range": 0.3,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**values, **changes})).eval().requires_grad_(False)


def write_records(path: Path, count: int = 24, prompt: int = 5, response: int = 20, seed: int = 0) -> Path:
    """Write a file like `hf-dflash data` does, with random tokens in 2 .. 89, so that higher ids stay unused."""
    generator = torch.Generator().manual_seed(seed)
    with path.open("w", encoding="utf-8") as file:
        for key in range(count):
            ids = torch.randint(2, 90, (prompt + response,), generator=generator).tolist()
            file.write(json.dumps({"key": str(key), "prompt_ids": ids[:prompt], "response_ids": ids[prompt:]}) + "\n")
    return path


def tiny_settings(folder: Path, **changes) -> TrainingSettings:
    """Settings for four steps on the CPU."""
    values = {
        "target": "tiny",
        "data": str(folder / "data.jsonl"),
        "out": str(folder / "run"),
        "layers": 1,
        "block_size": 4,
        "num_taps": 2,
        "anchors": 4,
        "max_steps": 4,
        "batch_size": 2,
        "held_out": 2,
        "evaluate_every": 2,
        "save_every": 2,
        "log_every": 1,
        "final_prompts": 2,
        "final_tokens": 8,
        "selector_rank": 4,
        "selector_top_k": 4,
        "device": "cpu",
    }
    return TrainingSettings(**{**values, **changes})
