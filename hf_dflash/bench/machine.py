"""The conditions of a measurement: machine, versions and commit."""

import gc
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hf_dflash.pair import available_accelerators
from hf_dflash.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "dflash", "bitsandbytes", "gptqmodel")


def conditions() -> dict[str, Any]:
    """Return versions, machine, commit, time and command line, as JSON-serializable types."""
    return {
        "hf_dflash": __version__,
        "commit": commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": next(map(accelerator_name, available_accelerators()), None),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def accelerator_name(kind: str) -> str:
    """Return the name of the accelerator of a kind ("cuda", "xpu", "mps"); the kind if torch knows no name."""
    module = torch.get_device_module(kind)
    return module.get_device_name() if hasattr(module, "get_device_name") else kind


def processor() -> str:
    """Return the processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Return the checkout's commit, with a trailing `+` if tracked files differ from it; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") if head else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished, so that a time is the work's and not only that of its launch."""
    torch.get_device_module(device).synchronize()


def free_memory() -> None:
    """Give back the memory of objects that nothing refers to any more."""
    gc.collect()
    for accelerator in available_accelerators():
        torch.get_device_module(accelerator).empty_cache()
