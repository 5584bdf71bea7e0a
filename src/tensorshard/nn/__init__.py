"""Parallel layers and losses, like ``torch.nn``: TorchShard's names."""

from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.loss.heads.loss.margins import ArcFace, CosFace
from tensorshard.loss.heads.module.parallel_linear_cross_entropy import ParallelLinearCrossEntropy
from tensorshard.loss.softmax_cross_entropy import CrossEntropyOutput
from tensorshard.nn import functional, init
from tensorshard.nn.embedding import ParallelEmbedding
from tensorshard.nn.linear import ParallelLinear
from tensorshard.nn.loss import ParallelCrossEntropyLoss
from tensorshard.nn.register import RegisterParallelDim

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
