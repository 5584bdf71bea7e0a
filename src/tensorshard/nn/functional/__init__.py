"""Functional forms of the parallel layers and losses, like ``torch.nn.functional``."""

from tensorshard.nn.functional.cross_entropy import parallel_cross_entropy
from tensorshard.nn.functional.embedding import parallel_embedding
from tensorshard.nn.functional.linear import parallel_linear
from tensorshard.nn.functional.linear_cross_entropy import parallel_linear_cross_entropy

__all__ = ["parallel_cross_entropy", "parallel_embedding", "parallel_linear", "parallel_linear_cross_entropy"]
