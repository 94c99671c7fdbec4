"""Hand-written AWQ checkpoints: any transformers model with its linear layers rounded to 4 bits.

The storage is AWQ's GEMM layout (`qweight`, `qzeros`, `scales`), with plain rounding to the nearest of 16 levels. Real
AWQ chooses scales based on activations, which changes the stored weights but not their format.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

#: Eight columns share an int32. The four bits at place i (from the lowest) hold column COLUMN_AT[i] of them.
COLUMN_AT = (0, 2, 4, 6, 1, 3, 5, 7)
LEVELS = 16


def pack(levels: torch.Tensor) -> torch.Tensor:
    """Pack `(rows, columns)` of 0..15 into `(rows, columns / 8)` int32.

    Example:
        columns 0..7 hold 0..7: from the lowest bits up, the places hold 0 2 4 6 1 3 5 7, which is 0x75316420.
    """
    octets = levels.to(torch.int64).unflatten(-1, (-1, 8))
    packed = sum(octets[..., column] << (4 * place) for place, column in enumerate(COLUMN_AT))
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32).contiguous()


def round_to_levels(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a linear layer's weight `(out, in)`.

    Returns:
        levels `(in, out)`, and zero points and scales per group of inputs, `(in / group_size, out)`:
        weight ~ (level - zero point) * scale.
    """
    groups = weight.float().t().unflatten(0, (-1, group_size))
    # A range without 0 would need a zero point outside 0..15.
    high, low = groups.amax(1).clamp(min=0), groups.amin(1).clamp(max=0)
    scales = ((high - low).clamp(min=1e-5) / (LEVELS - 1)).to(torch.float16).contiguous()
    zeros = (-low / scales.float()).round().clamp(0, LEVELS - 1)
    levels = (groups / scales.float()[:, None]).round() + zeros[:, None]
    return levels.clamp(0, LEVELS - 1).flatten(0, 1), zeros, scales


def save_awq(
    model: PreTrainedModel, folder: Path, group_size: int = 32, keep: Sequence[str] = ("lm_head",)
) -> dict[str, torch.Tensor]:
    """Save `model` as an AWQ checkpoint, with all other weights in float16.

    Args:
        model: cast to float16 in place.
        folder: folder of the checkpoint.
        group_size: number of inputs that share a scale; must divide every layer's input size.
        keep: substrings of module names that are not quantized.

    Returns:
        the dequantized weights `(out, in)` in float32, by module name.
    """
    model.half().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    dequantized = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or any(part in name for part in keep):
            continue
        levels, zeros, scales = round_to_levels(weights.pop(f"{name}.weight"), group_size)
        weights |= {f"{name}.qweight": pack(levels), f"{name}.qzeros": pack(zeros), f"{name}.scales": scales}
        offsets = levels.unflatten(0, (-1, group_size)) - zeros[:, None]
        dequantized[name] = (offsets * scales.float()[:, None]).flatten(0, 1).t().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return dequantized
