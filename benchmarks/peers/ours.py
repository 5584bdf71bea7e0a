"""tensorshard."""

from torch import Tensor

import tensorshard as ts
from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import LOSSES, OPTIMIZER


def build(
    model: ModelFactory,
    rank: int,
    world_size: int,
    *,
    zero: int,
    logits: str = "auto",
    recompute: str = "none",
    loss: str = "cross entropy",
) -> Step:
    """Options: `zero` is the ZeRO level, 0 to 3; `logits` and `recompute` as in ``ts.Plan``;
    `loss` is a key of :data:`benchmarks.workload.LOSSES`."""
    plan = ts.Plan(zero=zero, logits=logits, recompute=recompute)
    engine = ts.parallelize(model(), plan, optimizer=OPTIMIZER, loss_fn=LOSSES[loss], device="cpu")

    def step(inputs: Tensor, targets: Tensor) -> float:
        return engine.step(inputs, targets).item()

    return step
