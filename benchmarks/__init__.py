"""Benchmarks against libraries that do the same: ``python -m benchmarks NAME`` in the repository's root."""
