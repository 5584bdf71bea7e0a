"""Apple's cut cross entropy: its Triton kernels ("cce"), or the form that runs without a GPU, a compiled plain one."""

from cut_cross_entropy import linear_cross_entropy

from benchmarks.heads import Head, HeadWork, with_sgd


def build(
    work: HeadWork, rank: int, world_size: int, *, implementation: str = "torch_compile", dtype: str = "float32"
) -> Head:
    weight = work.weight(rank, world_size, dtype).requires_grad_()
    return with_sgd(
        work,
        weight,
        lambda features, targets: linear_cross_entropy(features, weight, targets, impl=implementation),
    )
