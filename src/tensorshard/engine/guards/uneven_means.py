"""What the first step shows: whether the loss is a mean over a number that differs between ranks or micro-batches, such
as that of the tokens that are not padding; and whether data ranks have the same samples.

The Engine weighs the mean of each part of a batch by its samples. Of such a loss it should weigh by that number.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.world import world
from tensorshard.engine.guards.same_batch import batch_digest
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.autograd import means_of
from tensorshard.torch_private.pytree import tree_tensors

logger = logging.getLogger("tensorshard")

_SHOWN = 8


class UnevenMeans:
    """Looks at the losses and batches of the first step, and logs what it finds. It costs nothing after that.

    Attributes:
        watching: whether the first step is not over yet.
    """

    def __init__(self, mesh: Mesh, micro_batches: int) -> None:
        self._mesh = mesh
        self._parts: list[tuple[float, list[torch.Tensor]]] = []
        self._batches: list[int] = []
        is_real = not world().is_simulated and dist.get_backend(mesh.world_group) != "fake"
        self.watching = is_real and mesh.dp_size * micro_batches > 1

    def begin(self) -> None:
        """Forgets the parts of a step that failed."""
        self._parts, self._batches = [], []

    def note_batch(self, batch: Any) -> None:
        """Notes a batch of this rank, or a micro-batch."""
        wanted = self.watching and self._mesh.dp_size > 1 and len(self._batches) < _SHOWN
        if wanted and all(tensor.numel() for tensor in tree_tensors(batch)):
            self._batches.append(batch_digest(batch, values=True))

    def note(self, mean: torch.Tensor, samples: float) -> None:
        """Notes the mean loss of `samples` samples, with its graph. Only the ratio of these numbers matters."""
        if self.watching:
            self._parts.append((samples, means_of(mean)))

    def compare(self) -> None:
        """Compares the parts of all ranks, once. A collective of the mesh, at the same step on all of its ranks."""
        if not self.watching:
            return
        self.watching = False
        mine = [(samples, [value.item() for value in over]) for samples, over in self._parts]
        found: list[tuple[int, list[tuple[float, list[float]]], list[int]]] = [(0, [], [])] * self._mesh.world_size
        dist.all_gather_object(found, (self._mesh.dp_rank, mine, self._batches), group=self._mesh.world_group)
        self.begin()
        self._say_if_same({rank: batches for rank, _, batches in found})
        by_rank = {rank: parts for rank, parts, _ in found if parts}  # ranks of one batch found the same
        parts = [part for _, parts in sorted(by_rank.items()) for part in parts]
        differing = _differing(parts)
        if differing is not None and self._mesh.rank == 0:
            shown = ", ".join(f"{value:g}" for value in differing[:_SHOWN]) + ", ..." * (len(differing) > _SHOWN)
            logger.warning(
                "the loss is a mean over a number of targets that differs between data ranks or micro-batches (%s). "
                "Their means are not weighted by it, so that the loss depends on how many there are: give (sum, "
                "count), of cross_entropy(..., reduction='sum') and (targets != -100).sum() for instance, or "
                "weight[targets].sum() where classes have weights; or take loss_fn=ts.model_loss for a model that "
                "computes its own loss (docs/coupled-losses.md)",
                shown,
            )

    def _say_if_same(self, batches: dict[int, list[int]]) -> None:
        """Logs it if data ranks were given the same samples."""
        first: dict[tuple[int, ...], int] = {}
        for rank, digests in sorted(batches.items()):
            other = first.setdefault(tuple(digests), rank)
            if digests and other != rank and self._mesh.rank == 0:
                logger.warning(
                    "data ranks %d and %d were given the same samples in the first step, so that each counts twice and "
                    "more ranks learn no more: take engine.loader(dataset, batch_size), or a DataLoader with "
                    "DistributedSampler(dataset, num_replicas=engine.mesh.dp_size, rank=engine.mesh.dp_rank)",
                    other,
                    rank,
                )
                return


def _differing(parts: list[tuple[float, list[float]]]) -> list[float] | None:
    """The divisors of a mean that are neither the same in all parts nor in proportion to their samples."""
    for over in zip(*(over for _, over in parts), strict=False):
        for_each_sample = [value / (samples or 1) for value, (samples, _) in zip(over, parts, strict=True)]
        if not _are_equal(over) and not _are_equal(for_each_sample):
            return list(over)
    return None


def _are_equal(values: Sequence[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=1e-6) for value in values)
