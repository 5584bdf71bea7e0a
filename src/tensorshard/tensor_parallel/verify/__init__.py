"""Verification by numbers: whether a split block computes the same as the unsplit block."""
