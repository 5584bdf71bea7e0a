"""tensorshard."""

from torch import Tensor

import tensorshard as ts
from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn


def build(model: ModelFactory, rank: int, world_size: int, *, zero: int) -> Step:
    """Options: `zero` is the ZeRO level, 0 to 3."""
    engine = ts.parallelize(model(), ts.Plan(zero=zero), optimizer=OPTIMIZER, loss_fn=loss_fn, device="cpu")

    def step(inputs: Tensor, targets: Tensor) -> float:
        return engine.step(inputs, targets).item()

    return step
