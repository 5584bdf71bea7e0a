"""What the first step shows: whether the loss is a mean over a number that differs between ranks or micro-batches, such
as that of the tokens that are not padding; and whether data ranks have the same samples.

The Engine weighs the mean of each part of a batch by its samples. Of such a loss it should weigh by that number.

Also here: a guard that finds ranks with different batches, among ranks that compute the same samples together.

Those are the ranks that differ only along pp, cp or tp. With different batches they would train on one rank's samples
and another rank's targets, or on halves of different samples.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.world import world
from tensorshard.model.whole_sequences import is_part
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.autograd import means_of, statistics_in
from tensorshard.torch_private.process_groups import group_device
from tensorshard.torch_private.pytree import tree_flatten, tree_map, tree_tensors

logger = logging.getLogger("tensorshard")

_SHOWN = 8
_COMPARED = 1024  # elements of a factor
_AXES = ("pp", "cp", "tp")
_BITS = 62  # of a digest, as an int64


class UnevenMeans:
    """Looks at the losses and batches of the first step, and logs what it finds. It costs nothing after that.

    Attributes:
        watching: whether the first step is not over yet.
    """

    def __init__(self, mesh: Mesh, micro_batches: int) -> None:
        self._mesh = mesh
        self._parts: list[tuple[float, list[torch.Tensor]]] = []
        self._batches: list[int] = []
        self._samples = 0  # of the latest batch
        self._may_couple = False
        self._factors: list[list[list[float]]] = []  # of each part
        is_real = not world().is_simulated and dist.get_backend(mesh.world_group) != "fake"
        self.watching = is_real and mesh.dp_size * micro_batches > 1

    def begin(self) -> None:
        """Forgets the parts of a step that failed."""
        self._parts, self._batches, self._may_couple, self._factors = [], [], False, []

    def note_batch(self, batch: Any) -> None:
        """Notes a batch of this rank, or a micro-batch."""
        wanted = self.watching and self._mesh.dp_size > 1 and len(self._batches) < _SHOWN
        if self.watching:
            self._samples = next((tensor.size(0) for tensor in tree_tensors(batch) if tensor.dim()), 0)
        if wanted and all(tensor.numel() for tensor in tree_tensors(batch)):
            self._batches.append(batch_digest(batch, values=True))

    def note(self, mean: torch.Tensor, samples: float) -> None:
        """Notes the mean loss of `samples` samples, with its graph. Only the ratio of these numbers matters."""
        if self.watching:
            self._parts.append((samples, means_of(mean)))

    def note_loss(self, loss: torch.Tensor, samples: int | None = None) -> None:
        """Notes the loss of some samples, a mean or a sum, with its graph; None for those of the noted batch."""
        samples = self._samples if samples is None else samples
        if self.watching and samples and loss.requires_grad:
            may_couple, factors = statistics_in(loss, samples)
            self._may_couple |= may_couple
            self._factors.append([factor.double().flatten()[:_COMPARED].tolist() for factor in factors])

    def compare(self) -> bool:
        """Compares the parts of all ranks, once. A collective of the mesh, at the same step on all of its ranks.

        Returns:
            Whether some loss may depend on which samples are together in a part, and the log does not say so yet.
        """
        if not self.watching:
            return False
        self.watching = False
        mine = [(samples, [value.item() for value in over]) for samples, over in self._parts]
        here = self._mesh.dp_rank, mine, self._batches, self._may_couple, self._factors
        reports: list[Any] = [here] * self._mesh.world_size
        dist.all_gather_object(reports, here, group=self._mesh.world_group)
        self.begin()
        self._say_if_same({rank: batches for rank, _, batches, *_ in reports})
        by_rank = {rank: parts for rank, parts, *_ in reports if parts}  # ranks of one batch found the same
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
        if differing is not None:
            return False
        factors = [each for *_, of_parts in reports for each in of_parts]
        if any(not _same_factors(each, factors[0]) for each in factors):
            if self._mesh.rank == 0:
                logger.warning(
                    "the loss multiplies by numbers that differ between data ranks or micro-batches, as a balance loss "
                    "does by the tokens that each expert got. One process would take those of the whole batch: wrap "
                    "the function in engine.over_whole_batch(function) (docs/coupled-losses.md)"
                )
            return False
        return any(may_couple for _, _, _, may_couple, _ in reports)

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


def _same_factors(one: list[list[float]], other: list[list[float]]) -> bool:
    if [len(each) for each in one] != [len(each) for each in other]:
        return True  # other parts of a loss were computed: nothing can be said
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs)


def _differing(parts: list[tuple[float, list[float]]]) -> list[float] | None:
    """The divisors of a mean that are neither the same in all parts nor in proportion to their samples."""
    for over in zip(*(over for _, over in parts), strict=False):
        for_each_sample = [value / (samples or 1) for value, (samples, _) in zip(over, parts, strict=True)]
        if not _are_equal(over) and not _are_equal(for_each_sample):
            return list(over)
    return None


def _are_equal(values: Sequence[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=1e-6) for value in values)


class SameBatch:
    """Compares the ranks' batches: their shapes before every call, their values where the shapes are new.

    Comparing shapes takes one message of 24 bytes. Comparing values needs a copy to the host, and a wrong sampler shows
    at the first batch.

    Messages go over the groups' half for the CPU where there is one, so that nothing waits for a GPU.

    Args:
        mesh: where the ranks are.
        device: of this rank.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._axes = [axis for axis in _AXES if mesh.degrees[axis] > 1]
        self._groups = [mesh.group(axis) for axis in self._axes]
        self._device = group_device(self._groups[0], torch.device("cpu")) if self._groups else device
        self._compared: set[tuple[str, int]] = set()

    def check(self, call: str, inputs: Any, targets: Any) -> None:
        """A collective of the ranks that should have the same batch.

        Args:
            call: the Engine's method that was given the batch.

        Raises:
            ValueError: on all these ranks, if the batches differ in structure, shapes, types or values; or if one has a
                nested tensor, which no axis of them cuts.
        """
        if self._groups and any(tensor.layout == torch.jagged for tensor in tree_tensors((inputs, targets))):
            raise ValueError(
                f"engine.{call} was given a nested tensor of jagged layout under {' and '.join(self._axes)}, where "
                f"layers and messages have one shape: pad the sequences (torch.nested.to_padded_tensor) and mask what "
                f"is added, or take a plan of data ranks alone, with zero=1 to 3"
            )
        if not self._groups or dist.get_backend(self._groups[0]) == "fake" or world().is_simulated:
            return
        shapes = batch_digest((call, inputs, targets), values=False)
        rows = self._gathered([dist.get_rank(), shapes, int((call, shapes) not in self._compared)])
        equal = len({row[1] for row in rows}) == 1
        if equal and any(row[2] for row in rows):
            rows = self._gathered([dist.get_rank(), batch_digest((inputs, targets), values=True), 0])
            equal = len({row[1] for row in rows}) == 1
        if not equal:
            self._refuse(call, rows, inputs)
        self._compared.add((call, shapes))

    def _gathered(self, row: list[int]) -> list[list[int]]:
        """Every rank's `row`."""
        rows = torch.tensor([row], device=self._device)
        for group in self._groups:
            everyone = rows.new_empty((group.size() * rows.size(0), rows.size(1)))
            all_gather_into(everyone.view(-1), rows.view(-1), group, what="the batches' shapes")
            rows = everyone
        return rows.tolist()

    def _refuse(self, call: str, rows: list[list[int]], inputs: Any) -> None:
        described: list[Any] = [(dist.get_rank(), _described(inputs))]
        for group in self._groups:
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, described, group=group)
            described = [entry for entries in gathered for entry in entries]
        inputs_of = dict(described)
        first = rows[0]
        other = next(row for row in rows if row[1] != first[1])
        raise ValueError(
            f"engine.{call} was given different batches on ranks {first[0]} and {other[0]} (inputs of "
            f"{inputs_of[first[0]]} and {inputs_of[other[0]]}), which differ only along {' and '.join(self._axes)}: "
            f"such ranks pass the same batch. Draw it by engine.mesh.dp_rank of engine.mesh.dp_size, as in "
            f"DistributedSampler(dataset, num_replicas=engine.mesh.dp_size, rank=engine.mesh.dp_rank)"
        )


def batch_digest(batch: Any, *, values: bool) -> int:
    """A number that is the same for equal batches; without `values`, for those of equal structure and shapes."""
    leaves, structure = tree_flatten(tree_map(_plain, batch))
    digest = hashlib.blake2b(str(structure).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            if values and not is_part(leaf):  # ranks of a loader that cuts sequences have different parts
                flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        elif values and isinstance(leaf, bool | int | float | complex | str | bytes | None):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big") % 2**_BITS


def _plain(leaf: Any) -> Any:
    """A nested tensor as its values and where its samples begin."""
    is_nested = isinstance(leaf, torch.Tensor) and leaf.layout == torch.jagged
    return (leaf.values(), leaf.offsets()) if is_nested else leaf  # type: ignore[attr-defined]


def _described(inputs: Any) -> str:
    shapes = [str(list(leaf.shape)) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    return ", ".join(shapes) or "no tensors"
