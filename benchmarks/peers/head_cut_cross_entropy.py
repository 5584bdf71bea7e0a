"""Apple's cut cross entropy: the form of it that runs without a GPU, a compiled plain one."""

from cut_cross_entropy import linear_cross_entropy

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int) -> Head:
    weight = work.weight(rank, world_size).requires_grad_()
    return with_sgd(
        weight, lambda features, targets: linear_cross_entropy(features, weight, targets, impl="torch_compile")
    )
