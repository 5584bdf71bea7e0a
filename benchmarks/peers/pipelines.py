"""What the builders of pipelined contenders return.

    build(work, rank, world_size, **options) -> step

The default process group is there, on Gloo. ``step(inputs, targets)`` does one optimizer step on the whole batch,
which every rank is given, and returns the mean loss before it where this rank knows it.
"""

from collections.abc import Callable

from torch import Tensor

PipelineStep = Callable[[Tensor, Tensor], float | None]
