"""Functional forms of the parallel layers and losses, like ``torch.nn.functional``."""

from tensorshard.heads.loss.linear_cross_entropy import parallel_linear_cross_entropy
from tensorshard.layers.split_cross_entropy import parallel_cross_entropy
from tensorshard.layers.split_embedding import parallel_embedding
from tensorshard.layers.split_linear import parallel_linear

__all__ = ["parallel_cross_entropy", "parallel_embedding", "parallel_linear", "parallel_linear_cross_entropy"]
