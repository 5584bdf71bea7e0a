"""Functional forms of the parallel layers and losses, like ``torch.nn.functional``."""

from tensorshard.layers.split_embedding import parallel_embedding
from tensorshard.layers.split_linear import parallel_linear
from tensorshard.loss.heads.linear_cross_entropy import parallel_linear_cross_entropy
from tensorshard.loss.logits.distillation import distillation_loss
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy

__all__ = [
    "distillation_loss",
    "parallel_cross_entropy",
    "parallel_embedding",
    "parallel_linear",
    "parallel_linear_cross_entropy",
]
