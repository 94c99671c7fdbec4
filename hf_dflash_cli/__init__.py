"""The command line `hf-dflash`: one module per command.

It lies beside `hf_dflash` and not in it, because Python runs `hf_dflash/__init__.py`, and with it torch and
transformers, before any module inside. Command modules import those inside their functions, so that help and completion
answer at once; `answer`, `conversation` and `benchmark` are what they import then.
"""
