"""Helpers around training, by the names of ``torch.utils``."""
