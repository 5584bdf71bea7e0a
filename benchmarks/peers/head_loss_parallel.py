"""torch.distributed.tensor: a weight split by rows, and cross entropy under loss_parallel."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from benchmarks.heads import Head, HeadWork, with_sgd


def build(work: HeadWork, rank: int, world_size: int) -> Head:
    mesh = init_device_mesh(work.device, (world_size,))
    local = work.weight(rank, world_size)
    shape = torch.Size((work.classes, work.features))
    weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(work.features, 1))
    weight.requires_grad_()
    replicated = [Replicate()]

    def loss_of(features: Tensor, targets: Tensor) -> Tensor:
        given = DTensor.from_local(features, mesh, replicated, run_check=False)
        return F.cross_entropy(F.linear(given, weight), DTensor.from_local(targets, mesh, replicated, run_check=False))

    head = with_sgd(work, weight, loss_of, local)

    def step(features: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = head.step(features, targets)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return Head(step, local, head.states)
