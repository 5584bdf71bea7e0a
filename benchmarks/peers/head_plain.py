"""Plain PyTorch: a linear layer, its cross entropy, and SGD."""

from torch.nn import functional as F

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int) -> Head:
    weight = work.weight(rank, world_size).requires_grad_()
    return with_sgd(weight, lambda features, targets: F.cross_entropy(F.linear(features, weight), targets))
