"""Helpers around training, by the names of ``torch.utils``."""

from tensorshard.utils import data

__all__ = ["data"]
