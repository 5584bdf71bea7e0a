"""The head as an nn.Module."""
