"""tensorshard: ParallelLinearCrossEntropy, with its gradients or with its update in backward."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.heads import LEARNING_RATE, MOMENTUM, Head, HeadWork, with_sgd
from tensorshard.distributed.sharding import to_local
from tensorshard.nn import ParallelLinearCrossEntropy


def build(
    work: HeadWork,
    rank: int,
    world_size: int,
    *,
    update: bool = True,
    keep_logits: bool | None = None,
    dtype: str = "float32",
    momentum_dtype: str = "fp32",
) -> Head:
    options: dict[str, Any] = {"keep_logits": keep_logits, "dtype": getattr(torch, dtype)}
    if world_size > 1:
        options["group"] = dist.group.WORLD
    if update:
        options["update"] = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "momentum_dtype": momentum_dtype}
    head = ParallelLinearCrossEntropy(work.features, work.classes, **options)
    local = to_local(head.weight.detach())
    local.copy_(work.weight(rank, world_size))
    optimizer = head.optimizer
    if optimizer is None:
        return with_sgd(head.weight, head, local)

    def step(features: Tensor, targets: Tensor) -> Tensor:
        loss = head(features, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def states() -> list[Tensor]:
        return [local, *(to_local(value) for value in optimizer.state[head.weight].values())]

    return Head(step, local, states)
