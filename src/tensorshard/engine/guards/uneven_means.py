"""Whether the loss is a mean over a number that differs between ranks or micro-batches, such as that of the tokens that
are not padding.

The Engine weighs the mean of each part of a batch by its samples. Of such a loss it should weigh by that number.
"""

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tensorshard.comm.world import world
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.autograd import means_of

logger = logging.getLogger("tensorshard")

_SHOWN = 8


class UnevenMeans:
    """Looks at the losses of the first step, and logs what it finds. It costs nothing after that.

    Attributes:
        watching: whether the first step is not over yet.
    """

    def __init__(self, mesh: Mesh, micro_batches: int) -> None:
        self._mesh = mesh
        self._parts: list[tuple[int, list[torch.Tensor]]] = []
        is_real = not world().is_simulated and dist.get_backend(mesh.world_group) != "fake"
        self.watching = is_real and mesh.dp_size * micro_batches > 1

    def begin(self) -> None:
        """Forgets the parts of a step that failed."""
        self._parts = []

    def note(self, mean: torch.Tensor, samples: int) -> None:
        """Notes the mean loss of `samples` samples, with its graph."""
        if self.watching:
            self._parts.append((samples, means_of(mean)))

    def compare(self) -> None:
        """Compares the parts of all ranks, once. A collective of the mesh, at the same step on all of its ranks."""
        if not self.watching:
            return
        self.watching = False
        mine = [(samples, [value.item() for value in over]) for samples, over in self._parts]
        self._parts = []
        found: list[tuple[int, list[tuple[int, list[float]]]]] = [(0, [])] * self._mesh.world_size
        dist.all_gather_object(found, (self._mesh.dp_rank, mine), group=self._mesh.world_group)
        by_rank = {rank: parts for rank, parts in found if parts}  # ranks of one batch found the same
        parts = [part for _, parts in sorted(by_rank.items()) for part in parts]
        differing = _differing(parts)
        if differing is not None and self._mesh.rank == 0:
            shown = ", ".join(f"{value:g}" for value in differing[:_SHOWN]) + ", ..." * (len(differing) > _SHOWN)
            logger.warning(
                "the loss is a mean over a number of targets that differs between data ranks or micro-batches (%s). "
                "Their means are not weighted by it, so that the loss depends on how many there are: give (sum, "
                "count), of cross_entropy(..., reduction='sum') and (targets != -100).sum() for instance, or take "
                "loss_fn=ts.model_loss for a model that computes its own loss (docs/coupled-losses.md)",
                shown,
            )


def _differing(parts: list[tuple[int, list[float]]]) -> list[float] | None:
    """The divisors of a mean that are neither the same in all parts nor in proportion to their samples."""
    for over in zip(*(over for _, over in parts), strict=False):
        for_each_sample = [value / max(samples, 1) for value, (samples, _) in zip(over, parts, strict=True)]
        if not _are_equal(over) and not _are_equal(for_each_sample):
            return list(over)
    return None


def _are_equal(values: Sequence[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=1e-6) for value in values)
