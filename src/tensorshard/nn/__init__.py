"""Parallel layers and losses, like ``torch.nn``: TorchShard's names."""

from tensorshard.nn import functional, init
from tensorshard.nn.embedding import ParallelEmbedding
from tensorshard.nn.linear import ParallelLinear
from tensorshard.nn.loss import ParallelCrossEntropyLoss
from tensorshard.nn.module import ParallelModule
from tensorshard.nn.register import RegisterParallelDim

__all__ = [
    "ParallelCrossEntropyLoss",
    "ParallelEmbedding",
    "ParallelLinear",
    "ParallelModule",
    "RegisterParallelDim",
    "functional",
    "init",
]
