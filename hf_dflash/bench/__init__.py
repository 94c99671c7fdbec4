"""Measuring. Owns: methods to compare, prompt sets, the interleaved run and its report. Does not know: the command line."""
