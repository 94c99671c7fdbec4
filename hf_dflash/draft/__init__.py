"""DFlash drafts: network and configuration, published layouts, loading, inspection and export.

`errors`, `configuration_dflash`, `masking_dflash` and `modeling_dflash` are uploaded to the Hub with every exported
draft, so they import only each other, torch and transformers.
"""
