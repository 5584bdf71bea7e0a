"""Shared by all benchmarks: ranks, clocks, memory, statistics, results files and their tables."""
