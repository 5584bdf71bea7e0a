"""How many micro-batches an estimate must run to know what a step with more of them takes."""

from collections import Counter
from dataclasses import replace
from typing import Any

from tensorshard.model.batches import batch_size
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.plan.plan import Plan
from tensorshard.predict.operations import UPDATE, Operations, Transfer

_ROUNDS = 4  # a schedule that keeps a bounded number of micro-batches reaches it in so many rounds over the ranks
_ALONE = 3  # without a pipeline: the first makes gradients, the last has them reduced, and all others are alike


def enough_micro_batches(plan: Plan, inputs: Any, targets: Any) -> int:
    """The fewest micro-batches that take the same memory as those of a resolved `plan`.

    Without a pipeline three are enough. In a pipeline, each rank must keep the activations of as many at once as it
    does with all of them.
    """
    every = plan.micro_batches
    size = batch_size(inputs)
    if every <= _ALONE or size % every or not _divides(inputs, size) or not _divides(targets, size):
        return every
    if plan.pp == 1:
        return _ALONE
    from tensorshard.pipeline.run.draw_schedule import timeline

    def kept(count: int) -> list[int]:
        drawn = timeline(plan.pp_schedule, ranks=plan.pp, stages_per_rank=plan.stages_per_rank, micro_batches=count)
        return [drawn.kept(rank) for rank in range(plan.pp)]

    wanted: list[int] | None = None
    for count in range(plan.pp + 2, min(every, _ROUNDS * plan.pp + 1)):
        try:
            found = kept(count)
        except ValueError:  # the schedule does not take so many
            continue
        wanted = kept(every) if wanted is None else wanted
        if found == wanted:
            return count
    return every


def first_samples(tree: Any, size: int, count: int) -> Any:
    """The first `count` of `size` samples, as views: the memory of all of them stays."""
    return map_tensors_once(lambda tensor: tensor[:count] if tensor.dim() and count < size else tensor, tree)


def scaled(found: Operations, plan: Plan, run: int) -> Operations:
    """The operations of a step of the plan, from those of a step with `run` of its micro-batches.

    Forward and backward run for each micro-batch. Gradients are reduced once. Under ZeRO 3 they are reduced over shards
    for each micro-batch, and over replicas once.
    """
    if run == plan.micro_batches:
        return found

    def times(count: int, each: bool) -> int:
        return round(count * plan.micro_batches / run) if each else count

    return replace(
        found,
        kernels=Counter({k: times(count, k.section != UPDATE) for k, count in found.kernels.items()}),
        transfers=Counter({t: times(count, _is_of_each(t, plan)) for t, count in found.transfers.items()}),
    )


def _is_of_each(transfer: Transfer, plan: Plan) -> bool:
    if transfer.axis == "pp":
        return transfer.collective in ("send", "receive")  # not those of the loss, and of gradients that stages share
    if transfer.section == UPDATE:
        return False
    if transfer.axis in ("dp_replicate", "dp_shard", "dp", "world"):
        return plan.zero == 3 and transfer.collective != "all_reduce"
    return True


def _divides(tree: Any, size: int) -> bool:
    """Whether every tensor has `size` samples, or is a single number."""
    return all(not tensor.dim() or tensor.size(0) == size for tensor in tensor_leaves(tree))
