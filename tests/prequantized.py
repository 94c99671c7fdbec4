"""Hand-written quantized checkpoints: GPTQ, compressed-tensors, block-wise FP8 and MXFP4 (AWQ is in `awq.py`).

Linear weights `(out, in)` are rounded to the nearest level and stored in each format, with its `config.json` entry.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

GROUP = 32
BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

#: The tensors that a linear layer becomes, by their name after the module's.
Stored = dict[str, torch.Tensor]


def pack_eight(levels: torch.Tensor) -> torch.Tensor:
    """Pack `(rows, columns)` of 0..15 into `(rows, columns / 8)` int32, first column in the lowest bits."""
    octets = levels.to(torch.int64).unflatten(-1, (-1, 8))
    packed = sum(octets[..., i] << (4 * i) for i in range(8))
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32).contiguous()


def symmetric(weight: torch.Tensor, group: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels `(out, in)` in -top-1..top and scales `(out, in / group)`."""
    groups = weight.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=1e-5) / top
    return (groups / scales[..., None]).round().clamp(-top - 1, top).flatten(1), scales


def gptq(weight: torch.Tensor) -> Stored:
    """4 bits, groups of 32 inputs, zero point 8 (stored as 7)."""
    levels, scales = symmetric(weight, GROUP, 7)
    inputs = weight.shape[1]
    return {
        "qweight": pack_eight(levels + 8).t().contiguous(),
        "qzeros": torch.full((inputs // GROUP, weight.shape[0] // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.t().half().contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def packed_int4(weight: torch.Tensor) -> Stored:
    """compressed-tensors W4A16: 4 bits, symmetric, groups of 32 inputs."""
    levels, scales = symmetric(weight, GROUP, 7)
    return {
        "weight_packed": pack_eight(levels + 8),
        "weight_scale": scales.to(weight.dtype).contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def channel_int8(weight: torch.Tensor) -> Stored:
    """compressed-tensors W8A8: 8 bits, one scale per output."""
    levels, scales = symmetric(weight, weight.shape[1], 127)
    return {"weight": levels.to(torch.int8), "weight_scale": scales.to(weight.dtype)}


def channel_fp8(weight: torch.Tensor) -> Stored:
    """compressed-tensors FP8: one scale per output."""
    scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-5) / FP8_MAX
    return {"weight": (weight.float() / scales).to(FP8), "weight_scale": scales.to(weight.dtype)}


def block_fp8(weight: torch.Tensor) -> Stored:
    """Block-wise FP8: one scale per 128 x 128 block."""
    blocks = weight.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-5) / FP8_MAX
    levels = (blocks / scales[:, None, :, None]).to(FP8)
    return {"weight": levels.flatten(2, 3).flatten(0, 1).contiguous(), "weight_scale_inv": scales.contiguous()}


def compressed(kind: str, weights: dict, activations: dict | None = None) -> dict:
    """Return the compressed-tensors config for every linear layer except the head."""
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, **weights},
                "input_activations": activations and {"symmetric": True, "dynamic": True, **activations},
            }
        },
    }


INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
#: Format -> how a weight is stored, and its entry in config.json.
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict]] = {
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
        },
    ),
    "ct-w4a16": (
        packed_int4,
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    ),
    "ct-w8a8": (
        channel_int8,
        compressed("int-quantized", {**INT8, "strategy": "channel"}, {**INT8, "strategy": "token"}),
    ),
    "ct-fp8": (
        channel_fp8,
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, {**FLOAT8, "strategy": "token"}),
    ),
    "fp8": (
        block_fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
}


def save_quantized(model: PreTrainedModel, folder: Path, kind: str) -> None:
    """Save `model` with every linear layer except the head in one of the `FORMATS`."""
    store, entry = FORMATS[kind]
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = weights.pop(f"{name}.weight")
            weights |= {f"{name}.{suffix}": tensor for suffix, tensor in store(weight).items()}
    _finish(folder, weights, entry)


#: The 16 values of a 4-bit float, indexed by its bits.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert experts `(experts, in, out)` to blocks `(experts, out, in / 32, 16)` of two 4-bit floats per byte, and
    exponents `(experts, out, in / 32)` of their shared power of two, plus 127.
    """
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=2.0**-20) / 6.0).log2().ceil()
    scaled = groups / 2.0 ** exponents[..., None]
    codes = (scaled[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    # The first of two values is in the lower half of its byte.
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks.contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def save_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """Save a gpt-oss model with its experts in MXFP4, like the published checkpoints."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = mxfp4(weights.pop(name))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _finish(folder, weights, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def _finish(folder: Path, weights: dict[str, torch.Tensor], entry: dict) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = entry
    (folder / "config.json").write_text(json.dumps(config, indent=2))
