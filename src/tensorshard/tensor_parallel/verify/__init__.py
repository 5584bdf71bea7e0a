"""Verification by numbers: whether a split block computes what the unsplit one does."""
