"""Whether a loss treats each sample by itself, so that it does not depend on how samples are dealt to the ranks.

A Plan splits the batch: each data rank computes the loss of its own samples, one micro-batch at a time. The mean of
these is the loss of the whole batch only if no sample's loss depends on other samples. A contrastive loss, or the
balance loss of a router, couples samples. It then depends on the number of ranks, as under DistributedDataParallel.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.model.batches import batch_size
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.pytree import tree_flatten, tree_unflatten

logger = logging.getLogger("tensorshard")

_SEED = 0
_REMEDIES = (
    "If it is a mean over a number found in the batch, let loss_fn return (sum, count) of what it divides by. If it "
    "balances the load of experts, or takes another function of the whole batch, wrap that in "
    "engine.over_whole_batch(function). If it compares samples, as contrastive losses do, gather what it compares "
    "with ts.gather_samples, and take micro_batches=1"
)


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
