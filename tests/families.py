"""Tiny, randomly initialized targets of many families, with varied greedy text.

`FAMILIES[name].build(seed)` builds an fp32 model in eval mode in well under a second. `test_families.py` asserts that
the greedy text is varied, since a target that repeats itself hides rollback bugs.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from hf_dflash.target.cache import CACHE_KEYWORD

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


@torch.no_grad()
def init_image_projection(model: PreTrainedModel) -> None:
    """Initialize Gemma 3's image projection: it starts as zeros, which makes all images look the same."""
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)


@dataclass(frozen=True)
class Family:
    """A target family.

    Attributes:
        model_class: name of the transformers class.
        config_class: name of its configuration class.
        config: its arguments, or a function that returns them.
        kinds: cache kinds of its layers: full, sliding, chunked, delta, conv, mamba, mamba2, kda, hybrid, shared.
        initializer_range: standard deviation of the initial weights, chosen so that greedy text is varied.
        since: the first transformers version that has the family.
        adjust: applied to the built model.
    """

    model_class: str
    config_class: str
    config: dict | Callable[[], dict]
    kinds: tuple[str, ...] = ("full",)
    initializer_range: float = 0.4
    since: str = "5.17"
    adjust: Callable[[PreTrainedModel], None] | None = None

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a state other than keys and values."""
        return not {"full", "sliding", "chunked", "shared"} >= set(self.kinds)

    @property
    def available(self) -> bool:
        """Whether the installed transformers has this family."""
        return Version(transformers.__version__).release >= Version(self.since).release

    def build(self, seed: int = 0) -> PreTrainedModel:
        """Build a new fp32 model in eval mode; the same seed gives the same weights."""
        values = self.config() if callable(self.config) else dict(self.config)
        config = getattr(transformers, self.config_class)(**values)
        for each in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
            each.initializer_range = self.initializer_range
        torch.manual_seed(seed)
        model = getattr(transformers, self.model_class)(config).to(torch.float32).eval()
        if self.adjust is not None:
            self.adjust(model)
        return model


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

MOSTLY_LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "layer_types": MOSTLY_LINEAR,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
DELTA_MOE = dict(MOE, **DELTA, shared_expert_intermediate_size=48, num_experts=4)
CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "block_multiple_of": 8}
#: Mamba-2 sizes under the names that Bamba, Falcon-H1 and Granite share. Chunks are shorter than the prompts.
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

RECURRENT_FAMILIES = {
    "qwen3_next": Family("Qwen3NextForCausalLM", "Qwen3NextConfig", DELTA_MOE, ("delta", "full")),
    "qwen3_5": Family("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", dict(DENSE, **DELTA), ("delta", "full")),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", DELTA_MOE, ("delta", "full")),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", "OlmoHybridConfig", dict(DENSE, **DELTA), ("delta", "full")),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        dict(
            DEEPSEEK,
            q_lora_rank=None,
            layer_types=MOSTLY_LINEAR,
            num_local_experts=4,
            linear_head_dim=16,
            linear_num_heads=4,
        ),
        ("kda", "full"),
    ),
    "lfm2": Family("Lfm2ForCausalLM", "Lfm2Config", dict(DENSE, **CONV), ("conv", "full")),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        dict(MOE, **CONV, num_experts=4, num_dense_layers=1),
        ("conv", "full"),
    ),
    "mamba": Family("MambaForCausalLM", "MambaConfig", dict(BASE, state_size=8, conv_kernel=4, expand=2), ("mamba",)),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        dict(BASE, state_size=8, conv_kernel=4, expand=2, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
        ("mamba2",),
    ),
    "jamba": Family(
        "JambaForCausalLM",
        "JambaConfig",
        dict(DENSE, num_experts=2, attn_layer_period=4, attn_layer_offset=2, mamba_d_state=8, mamba_dt_rank=4),
        ("mamba", "full"),
    ),
    "bamba": Family(
        "BambaForCausalLM", "BambaConfig", dict(DENSE, **MAMBA2, attn_layer_indices=[2]), ("mamba2", "full")
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        dict(
            DENSE,
            **MAMBA2,
            layer_types=MOSTLY_LINEAR,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
        ),
        ("mamba2", "full"),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM", "FalconH1Config", dict(DENSE, **MAMBA2, mamba_d_ssm=128), ("hybrid", "mamba2", "full")
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        dict(
            DENSE,
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=8,
            conv_kernel=4,
            chunk_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=48,
            n_group=1,
            topk_group=1,
        ),
        ("mamba2", "full"),
    ),
    "zamba2": Family(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        dict(
            BASE,
            intermediate_size=96,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            num_mem_blocks=1,
            mamba_d_state=8,
            n_mamba_heads=8,
            mamba_ngroups=2,
            chunk_size=8,
            adapter_rank=8,
        ),
        ("hybrid", "mamba2", "full"),
        initializer_range=0.2,
    ),
}

#: Ids used by image prompts of the multimodal families.
IMAGE, BEGIN_IMAGE, END_IMAGE, VIDEO = 380, 381, 382, 379
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 64,
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN_IMAGE,
    "vision_end_token_id": END_IMAGE,
    "tie_word_embeddings": False,
}
GEMMA_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def rope_in_sections(sections: list[int]) -> dict:
    """Three-axis rotary positions, as in multimodal Qwen models."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}


#: Targets with a vision tower. They are built like the others but each needs its own image inputs.
MULTIMODAL_FAMILIES = {
    "qwen3_5_vl": Family(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        dict(
            QWEN_IDS,
            text_config=dict(
                DENSE, **DELTA, rope_parameters={**rope_in_sections([2, 1, 1]), "partial_rotary_factor": 0.5}
            ),
            vision_config=QWEN_VISION,
        ),
        ("delta", "full"),
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        dict(
            QWEN_IDS,
            text_config=dict(DENSE, rope_parameters=rope_in_sections([4, 2, 2])),
            vision_config=dict(QWEN_VISION, deepstack_visual_indexes=[0, 1]),
        ),
    ),
    "gemma3_vl": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": ATTENTION_FAMILIES["gemma3"].config,
            "vision_config": dict(GEMMA_VISION, image_size=32, patch_size=8),
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN_IMAGE,
            "eoi_token_index": END_IMAGE,
            "tie_word_embeddings": False,
        },
        ("full", "sliding"),
        adjust=init_image_projection,
    ),
    "gemma4_vl": Family(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {
            "text_config": ATTENTION_FAMILIES["gemma4"].config,
            "vision_config": dict(
                GEMMA_VISION,
                num_key_value_heads=2,
                head_dim=16,
                patch_size=4,
                pooling_kernel_size=2,
                position_embedding_size=64,
                default_output_length=70,
            ),
            "audio_config": None,
            "image_token_id": IMAGE,
            "boi_token_id": BEGIN_IMAGE,
            "eoi_token_id": END_IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": 378,
            "tie_word_embeddings": False,
        },
        ("full", "sliding", "shared"),
    ),
}

FAMILIES: dict[str, Family] = {
    name: family for name, family in {**ATTENTION_FAMILIES, **RECURRENT_FAMILIES}.items() if family.available
}


def accepts_cache(name: str) -> bool:
    """Before transformers 5.24, Mamba models call their cache `cache_params`, which hf_dflash does not use."""
    model_class = getattr(transformers, FAMILIES[name].model_class)
    return CACHE_KEYWORD in inspect.signature(model_class.forward).parameters


#: Families that cannot use a draft. Gemma 3n has several residual streams and cannot be tapped.
REFUSED = [name for name in FAMILIES if name == "gemma3n" or not accepts_cache(name)]
SERVED = [name for name in FAMILIES if name not in REFUSED]
