"""tensorshard."""

from torch import Tensor

import tensorshard as ts
from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn


def build(model: ModelFactory, rank: int, world_size: int, *, zero: int, logits: str = "auto") -> Step:
    """Options: `zero` is the ZeRO level, 0 to 3; `logits` as in ``ts.Plan``."""
    plan = ts.Plan(zero=zero, logits=logits)
    engine = ts.parallelize(model(), plan, optimizer=OPTIMIZER, loss_fn=loss_fn, device="cpu")

    def step(inputs: Tensor, targets: Tensor) -> float:
        return engine.step(inputs, targets).item()

    return step
