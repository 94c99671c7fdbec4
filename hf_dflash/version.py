"""The version of hf_dflash.

Owns: the one place where it is written. `setup.py`, the command line and the documentation read it here.
"""

__version__ = "0.1.0"
