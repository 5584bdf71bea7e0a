"""torch 2.13's F.linear_cross_entropy, which computes a chunk of the batch at a time."""

from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int) -> Head:
    weight = work.weight(rank, world_size).requires_grad_()
    options = LinearCrossEntropyOptions()
    return with_sgd(
        work, weight, lambda features, targets: F.linear_cross_entropy(features, weight, targets, options=options)
    )
