"""Tiny, randomly initialised targets of many families, with varied greedy text.

Owns: one configuration per family, the range of its initial weights, the cache kinds it exercises and the
transformers version that has it. `FAMILIES[name].build(seed)` makes an fp32 model in evaluation mode in well under a
second.

Does not know: what is tested with them. `test_families.py` asserts that their greedy text is varied, since a target
that repeats itself hides faults of a roll-back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

VOCAB = 384
HIDDEN = 64
HEAD_DIM = 16
#: Shorter than the prompts and texts of the tests, so that windows slide.
WINDOW = 8

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DENSE = dict(BASE, intermediate_size=96, head_dim=HEAD_DIM)
MOE = dict(DENSE, moe_intermediate_size=48, num_experts_per_tok=2)
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK = dict(
    {key: value for key, value in MOE.items() if key != "head_dim"},
    **LATENT,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
DEEPSEEK["num_key_value_heads"] = 4
FULL_AND_SLIDING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """A kind of target.

    Attributes:
        model_class: name of the transformers class.
        config_class: name of its configuration class.
        config: its arguments, or a function that makes them.
        kinds: cache kinds of its layers: full, sliding, chunked, delta, conv, mamba, mamba2, kda, hybrid, shared.
        initializer_range: spread of the initial weights, chosen so that greedy text is varied.
        since: the first transformers version that has the family.
    """

    model_class: str
    config_class: str
    config: dict | Callable[[], dict]
    kinds: tuple[str, ...] = ("full",)
    initializer_range: float = 0.4
    since: str = "5.17"

    @property
    def available(self) -> bool:
        """Whether the installed transformers has this family."""
        return Version(transformers.__version__).release >= Version(self.since).release

    def build(self, seed: int = 0) -> PreTrainedModel:
        """A fresh fp32 model in evaluation mode; the same seed gives the same weights."""
        values = self.config() if callable(self.config) else dict(self.config)
        config = getattr(transformers, self.config_class)(**values)
        for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
            part.initializer_range = self.initializer_range
        torch.manual_seed(seed)
        return getattr(transformers, self.model_class)(config).to(torch.float32).eval()


ATTENTION_FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", DENSE),
    "mistral": Family("MistralForCausalLM", "MistralConfig", dict(DENSE, sliding_window=WINDOW), ("sliding",)),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", DENSE),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", DENSE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(MOE, num_experts=4)),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", DENSE),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", DENSE),
    "glm4": Family("Glm4ForCausalLM", "Glm4Config", DENSE),
    "glm4_moe": Family("Glm4MoeForCausalLM", "Glm4MoeConfig", dict(MOE, n_routed_experts=4, num_mtp_layers=0)),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", dict(DEEPSEEK, num_mtp_layers=0)),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(DENSE, sliding_window=WINDOW, query_pre_attn_scalar=HEAD_DIM, layer_types=FULL_AND_SLIDING),
        ("full", "sliding"),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(DENSE, sliding_window=WINDOW, query_pre_attn_scalar=HEAD_DIM, layer_types=FULL_AND_SLIDING),
        ("full", "sliding"),
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        dict(
            DENSE,
            sliding_window=WINDOW,
            layer_types=FULL_AND_SLIDING,
            intermediate_size=[96] * 4,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
            altup_num_inputs=2,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        ("full", "sliding", "shared"),
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        dict(
            DENSE,
            sliding_window=WINDOW,
            global_head_dim=HEAD_DIM,
            layer_types=FULL_AND_SLIDING,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
        ),
        ("full", "sliding", "shared"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        dict(DENSE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=FULL_AND_SLIDING),
        ("full", "sliding"),
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        dict(
            DENSE,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "full_attention"] * 2,
        ),
        ("full", "chunked"),
    ),
}

FAMILIES: dict[str, Family] = {name: family for name, family in {**ATTENTION_FAMILIES}.items() if family.available}
