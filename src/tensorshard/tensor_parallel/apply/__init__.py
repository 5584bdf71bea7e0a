"""A table applied to a model: forwards are replaced on the instances."""
