"""tensorshard: a Plan with ``cp``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorshard as ts
from benchmarks.sequences import SequenceWork


def build(
    work: SequenceWork, rank: int, world_size: int, **fields: Any
) -> tuple[Callable[[], float], Callable[[], int]]:
    """A step of training, which returns its loss; and the bytes that attention has received so far.

    Args:
        fields: further ones of the Plan.
    """
    engine = ts.parallelize(
        work.model(),
        ts.Plan(cp=world_size, zero=0, **fields),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss_fn=_loss,
        device="cpu",
    )
    inputs, targets = work.batch()
    received = getattr(getattr(engine.sharded.sequences, "group", None), "received", {})

    def step() -> float:
        return engine.step({"input_ids": inputs}, targets).item()

    return step, lambda: sum(count for what, count in received.items() if what.startswith("attention"))


def _loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
