"""Logits of a model that are not computed until something needs them, and losses that never need them."""
