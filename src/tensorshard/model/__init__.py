"""Facts about any nn.Module: its blocks, parameters and ties, copies on fake tensors, sample inputs, batches."""
