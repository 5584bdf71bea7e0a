"""Parallel layers and losses, like ``torch.nn``: TorchShard's names."""

from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.loss.formulas import ArcFace, CosFace, CrossEntropyOutput
from tensorshard.loss.heads.parallel_linear_cross_entropy import ParallelLinearCrossEntropy
from tensorshard.nn import functional, init
from tensorshard.nn.cross_entropy_loss import ParallelCrossEntropyLoss
from tensorshard.nn.split_layers import ParallelEmbedding, ParallelLinear, RegisterParallelDim

__all__ = [
    "ArcFace",
    "CosFace",
    "CrossEntropyOutput",
    "ParallelCrossEntropyLoss",
    "ParallelEmbedding",
    "ParallelLinear",
    "ParallelLinearCrossEntropy",
    "ParallelModule",
    "RegisterParallelDim",
    "functional",
    "init",
]
