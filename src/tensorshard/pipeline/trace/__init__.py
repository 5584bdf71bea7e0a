"""One run of a model on fake tensors: which units are called, and what each needs of earlier ones."""
