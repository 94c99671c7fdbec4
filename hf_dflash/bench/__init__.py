"""Measuring.

Owns: the methods to compare, the prompt sets, the interleaved run and its report. Does not know: the command line.
"""
