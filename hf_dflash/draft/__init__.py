"""What a draft is: its network and configuration, the layouts it is published in, loading, inspecting and exporting it.

`errors`, `configuration_dflash`, `masking_dflash` and `modeling_dflash` travel to the Hub with every exported draft, so
they import only each other, torch and transformers.
"""
