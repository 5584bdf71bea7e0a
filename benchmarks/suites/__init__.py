"""The benchmarks, one file each, found by :mod:`benchmarks.registry`."""
