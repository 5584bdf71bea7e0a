"""Faster functions in the place of a model's own code, found by what it computes: ``ts.swap``."""
