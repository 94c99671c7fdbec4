"""Everything that depends on the target: its hidden states and head, its attention over a block, its cache, and the
processes that share it.
"""
