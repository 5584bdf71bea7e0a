"""One run of a model on fake tensors: which units are called, and which earlier outputs each of them needs."""
