"""Everything that depends on the target: its hidden states and head, attention over a block, its cache, and running it
in several processes.
"""
