"""One file a contender, each written as its own documentation recommends.

Every module has a function

    build(model, rank, world_size, **options) -> step

in which ``model()`` returns the plain model with its initial weights, to be called at most once. ``build``
starts the default process group, on Gloo. ``step(inputs, targets)`` does one optimizer step on this rank's
batch and returns the loss before it: this rank's, or the mean over ranks.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

ModelFactory = Callable[[], Any]
Step = Callable[[Tensor, Tensor], float]
