"""Benchmarks: the methods to compare, the interleaved runs, and the report."""
