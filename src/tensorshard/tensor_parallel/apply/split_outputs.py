"""What a model's output layers return: whole logits or, within a step, logits that are split over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.loss.logits.split_logits import split_logits


class SplitOutputs:
    """Whether output layers leave their outputs split.

    They do within a step, where every rank does the same with what the model returns. Elsewhere a single rank may use
    the output, to print it, say. So it must be whole.
    """

    def __init__(self) -> None:
        self._kept = False
        self.sizes: dict[nn.Module, int] = {}
        """The output layers, each with its number of features on all ranks together."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this, outputs stay split until somebody needs the whole."""
        before, self._kept = self._kept, True
        try:
            yield
        finally:
            self._kept = before

    def finish(self, part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        """The whole output of `size` features, or a tensor that stands for it. `part` is what this rank computed."""
        if self._kept:
            return split_logits(part, -1, size, group)
        return collectives.gather(part, -1, group, size=size)
