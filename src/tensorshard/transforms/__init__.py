"""Model to model, for what concerns one rank alone: precision, recomputation, compilation, activations elsewhere."""
