"""The version of hf_dflash, also read by `pyproject.toml`, the command line and the documentation."""

__version__ = "0.1.0"
