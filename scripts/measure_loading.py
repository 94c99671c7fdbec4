"""Time and peak memory of `load_draft` for a large bf16 checkpoint that is made on the spot.

    python scripts/measure_loading.py [--gigabytes 1]

Prints, each measured in a process of its own: the time to load, the time to load and read every weight once, and the
peak memory that the process gained (as a share of the file), for `load_draft`, for the same with `dtype=torch.float32`,
and for a plain `safetensors.torch.load_file` as a yardstick. Linux only: memory is read from /proc.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.loading import load_draft
from hf_dflash.draft.modeling_dflash import DFlashDraftModel

LAYERS_PER_GIGABYTE = 5
SIZES = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
TAPS = [1, 9, 17, 25, 33]


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Writes a draft of the sizes of Qwen3-4B's, with as many layers as the file is to be large; returns its bytes."""
    layers = max(1, round(gigabytes * LAYERS_PER_GIGABYTE))
    rope = {"rope_type": "default", "rope_theta": 1e6}
    block = {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": TAPS}
    config = DFlashConfig(**SIZES, **block, num_hidden_layers=layers, rope_parameters=rope)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DFlashDraftModel(config).state_dict().items()}
    raw = {
        **SIZES,
        "num_hidden_layers": layers,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "dtype": "bfloat16",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": TAPS},
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file({name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}, weights(folder))
    return weights(folder).stat().st_size


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def peak_bytes() -> int:
    """The most memory that this process has held, mapped files included."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def measure(way: str, folder: Path) -> dict[str, float]:
    """Loads in this process and reports seconds and bytes."""
    before, start = peak_bytes(), time.perf_counter()
    if way == "load_file":
        tensors = list(load_file(weights(folder)).values())
    else:
        tensors = list(load_draft(folder, dtype=torch.float32 if way == "float32" else None).parameters())
    loaded = time.perf_counter() - start
    for tensor in tensors:
        tensor.max()
    return {"load_s": loaded, "load_and_read_s": time.perf_counter() - start, "peak_bytes": peak_bytes() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, folder = arguments.measure
        print(json.dumps(measure(way, Path(folder))))
        return
    with tempfile.TemporaryDirectory() as name:
        size = write_checkpoint(Path(name), arguments.gigabytes)
        print(f"file: {size / 1e9:.2f} GB, bfloat16")
        for way in ("load_draft", "float32", "load_file"):
            command = [sys.executable, __file__, "--measure", way, name]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(
                f"{way:>10}: loaded in {found['load_s']:.2f} s, loaded and read in {found['load_and_read_s']:.2f} s, "
                f"peak {found['peak_bytes'] / size:.2f} x the file"
            )


if __name__ == "__main__":
    main()
