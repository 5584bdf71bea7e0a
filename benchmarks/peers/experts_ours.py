"""tensorshard: a Plan with ``ep``, ``tp`` or ZeRO."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

import tensorshard as ts
from benchmarks.experts import OPTIMIZER, MixtureWork, loss_fn
from tensorshard.expert_parallel import exchange


def build(
    work: MixtureWork, rank: int, world_size: int, **fields: Any
) -> tuple[Callable[[], float], Callable[[], int]]:
    """A step of training, which returns its loss; and the bytes of rows that came from other ranks so far.

    Args:
        fields: of the Plan.
    """
    engine = ts.parallelize(work.model(), ts.Plan(**fields), optimizer=OPTIMIZER, loss_fn=loss_fn, device="cpu")
    inputs, targets = (part.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in work.batch())
    received = [0]
    start = exchange.start_exchange

    def counting(parts: Any, sizes: list[int], like: torch.Tensor, group: dist.ProcessGroup) -> Any:
        if like.is_floating_point() and like.size(-1) > 1:  # tokens, not their numbers or weights
            received[0] += (sum(sizes) - sizes[group.rank()]) * like.element_size()
        return start(parts, sizes, like, group)

    def step() -> float:
        exchange.start_exchange = counting
        try:
            return engine.step({"input_ids": inputs}, targets).item()
        finally:
            exchange.start_exchange = start

    return step, lambda: received[0]
