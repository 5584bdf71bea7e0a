"""Plain PyTorch: a linear layer, its cross entropy, and SGD."""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int, *, dtype: str = "float32", compiled: bool = False) -> Head:
    weight = work.weight(rank, world_size, dtype).requires_grad_()

    def loss_of(features: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(features, weight), targets)

    return with_sgd(work, weight, torch.compile(loss_of) if compiled else loss_of)
