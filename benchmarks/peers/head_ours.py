"""tensorshard: ParallelLinearCrossEntropy, with its gradients or with its update in backward."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.heads import LEARNING_RATE, MOMENTUM, Head, HeadWork, with_sgd
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
        options["group"] = init_device_mesh(work.device, (world_size,))
    if update:
        options["update"] = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "momentum_dtype": momentum_dtype}
    # Without values at first: of a large head, drawing them as nn.Linear does takes longer than what is measured.
    head = ParallelLinearCrossEntropy(work.features, work.classes, device="meta", **options).to_empty(
        device=work.device
    )
    local = head.weight.detach()
    work.fill(local, rank, world_size)
    optimizer = head.optimizer
    if optimizer is None:
        return with_sgd(work, head.weight, head, local)

    def step(features: Tensor, targets: Tensor) -> Tensor:
        with work.autocast():
            loss = head(features, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def states() -> list[Tensor]:
        return [local, *optimizer.state[head.weight].values()]

    return Head(step, local, states)
