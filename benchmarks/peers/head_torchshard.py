"""TorchShard 0.1: its functional parallel linear layer and parallel cross entropy."""

import torchshard
from torchshard.nn.functional import parallel_cross_entropy, parallel_linear

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int) -> Head:
    if not torchshard.distributed.is_initialized():
        torchshard.distributed.init_process_group(group_size=world_size)
    weight = work.weight(rank, world_size).requires_grad_()
    return with_sgd(
        work,
        weight,
        lambda features, targets: parallel_cross_entropy(parallel_linear(features, weight, dim=-1), targets),
    )
