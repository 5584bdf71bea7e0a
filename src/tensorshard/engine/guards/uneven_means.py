"""What the first step shows of the loss: whether it is a mean over a number that differs between parts of the batch,
such as that of the tokens that are not padding; and whether data ranks have the same samples.

The Engine weighs the mean of each part of a batch by its samples. Of such a loss it should weigh by that number.

Also here: whether a loss treats each sample by itself. A contrastive loss, or the balance loss of a router, couples
samples. It then depends on how they are dealt to ranks and micro-batches, as under DistributedDataParallel.

Also here: whether a loss was divided by the number of micro-batches already, as plain loops do and the Engine does.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.world import world
from tensorshard.engine.guards.wrong_batch import batch_digest
from tensorshard.model.batches import batch_size
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.autograd import divisor_of_mean, means_of, statistics_in
from tensorshard.torch_private.pytree import tree_flatten, tree_tensors, tree_unflatten

logger = logging.getLogger("tensorshard")

_SHOWN = 8
_SEED = 0
_REMEDIES = (
    "If it is a mean over a number found in the batch, let loss_fn return (sum, count) of what it divides by. If it "
    "balances the load of experts, or takes another function of the whole batch, wrap that in "
    "engine.over_whole_batch(function). If it compares samples, as contrastive losses do, gather what it compares "
    "with ts.gather_samples, and take micro_batches=1"
)
_COMPARED = 1024  # elements of a factor


class UnevenMeans:
    """Looks at the losses and batches of the first step, and logs what it finds. It costs nothing after that.

    Attributes:
        watching: whether the first step is not over yet.
    """

    def __init__(self, mesh: Mesh, micro_batches: int) -> None:
        self._mesh = mesh
        self._micro_batches = micro_batches
        self._parts: list[tuple[float, list[torch.Tensor], int | None]] = []
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
            self._parts.append((samples, means_of(mean), divisor_of_mean(mean)))

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
        mine = [(samples, [value.item() for value in over]) for samples, over, _ in self._parts]
        divisors = {divisor for *_, divisor in self._parts}
        here = self._mesh.dp_rank, mine, self._batches, divisors, self._may_couple, self._factors
        reports: list[Any] = [here] * self._mesh.world_size
        dist.all_gather_object(reports, here, group=self._mesh.world_group)
        self.begin()
        self._say_if_same({rank: batches for rank, _, batches, *_ in reports})
        self._say_if_divided(set().union(*(divisors for _, _, _, divisors, *_ in reports)))
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
        return any(may_couple for *_, may_couple, _ in reports)

    def _say_if_divided(self, divisors: set[int | None]) -> None:
        """Logs it if all mean losses were divided by the number of micro-batches."""
        if divisors == {self._micro_batches} and self._micro_batches > 1 and self._mesh.rank == 0:
            logger.warning(
                "the loss is a mean that was divided by %d, and Plan(micro_batches=%d) divides by it again: the "
                "gradients are 1/%d of what they should be. Give the mean itself, without '/ %d' "
                "(docs/your-own-loop.md)",
                *[self._micro_batches] * 4,
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


def check_independent_samples(
    evaluate: Callable[[Any, Any], torch.Tensor],
    mesh: Mesh,
    inputs: Any,
    targets: Any,
    *,
    micro_batches: int,
    tolerance: float,
    is_asked: bool,
) -> None:
    """Compares the loss of the batch with that of the same samples, dealt to ranks and micro-batches in another way.

    If they differ, the log of rank 0 says so. A collective of all ranks; the batch is gathered on each data rank.

    Args:
        evaluate: returns the mean loss of a batch, cut into `micro_batches`, in evaluation mode.
        tolerance: the relative difference that rounding may cause.
        is_asked: whether the user wants to know what cannot be checked, too.
    """
    if mesh.dp_size * micro_batches == 1:
        return
    batches: list[Any] = [None] * mesh.dp_size
    dist.all_gather_object(batches, (inputs, targets), group=mesh.dp_group)
    dealt = dealt_otherwise(batches, [batch_size(given) for given, _ in batches], mesh.dp_rank)
    if dealt is None:
        if mesh.rank == 0 and is_asked:
            logger.warning(
                "debug: whether the loss couples samples is not checked: the ranks' batches cannot be joined"
            )
        return
    state = torch.get_rng_state()
    first = evaluate(inputs, targets).item()
    if not is_asked and not torch.equal(state, torch.get_rng_state()):
        return  # other samples get other random numbers
    other = evaluate(*dealt[0]).item()
    if mesh.rank == 0 and abs(first - other) > tolerance * max(abs(first), abs(other)):
        logger.warning(
            "%sthe loss of a batch is %.6g, and %.6g when its samples are dealt to the %d data ranks and "
            "%d micro-batches in another order. So it couples samples, and depends on the number of ranks. %s "
            "(docs/coupled-losses.md)",
            "debug: " if is_asked else "",
            first,
            other,
            mesh.dp_size,
            micro_batches,
            _REMEDIES,
        )


def dealt_otherwise(batches: list[Any], sizes: list[int], rank: int) -> tuple[Any, torch.Tensor] | None:
    """As many samples as rank `rank` had, from all ranks' samples in another order.

    Args:
        batches: of each rank, of any structure. Tensors whose first dimension is not the samples stay as they are.
        sizes: how many samples each has.

    Returns:
        The batch, and for each place of the joined batches the sample that is there now; None if they cannot be joined.
    """
    flat = [tree_flatten(batch) for batch in batches]
    start = sum(sizes[:rank])
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(_SEED), device="cpu")
    mine = order[start : start + sizes[rank]]
    if len({len(leaves) for leaves, _ in flat}) > 1:
        return None
    leaves = []
    for column in zip(*(flattened for flattened, _ in flat), strict=True):
        first = column[0]
        if not isinstance(first, torch.Tensor) or first.dim() == 0 or not _are_samples(column, sizes):
            leaves.append(column[rank])
        elif len({part.shape[1:] for part in column}) > 1:
            return None
        else:
            joined = torch.cat([part.to(first.device) for part in column])
            leaves.append(joined[mine.to(first.device)])
    return tree_unflatten(leaves, flat[rank][1]), order


def _are_samples(column: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    return [part.shape[:1] for part in column] == [(size,) for size in sizes]
