"""LinkedIn's Liger kernels: a linear layer fused with its cross entropy, a chunk of the batch at a time."""

from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int, *, dtype: str = "float32") -> Head:
    weight = work.weight(rank, world_size, dtype).requires_grad_()
    loss_of = LigerFusedLinearCrossEntropyLoss()
    return with_sgd(work, weight, lambda features, targets: loss_of(weight, features, targets))
