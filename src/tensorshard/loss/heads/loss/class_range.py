"""Which of a head's classes this rank holds."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm import primitives
from tensorshard.comm.groups import Group
from tensorshard.comm.marks import get_layout
from tensorshard.comm.sharding import shard_range, to_local
from tensorshard.layers.arguments import full_size, parameter_group


@dataclass(frozen=True)
class Place:
    """This rank's part of the classes.

    Args:
        start: its first class.
        classes: of all ranks.
        group: the ranks that hold them; None if one holds all.
    """

    start: int
    classes: int
    group: dist.ProcessGroup | None


def head_group(weight: torch.Tensor, group: Group | None) -> dist.ProcessGroup | None:
    """The ranks that hold a head's classes; None where one process holds them all.

    Raises:
        ValueError: the weight is a DTensor that is not split along its classes.
        RuntimeError: there is a process group, but no model-parallel one, and none was given.
    """
    if not isinstance(weight, DTensor):
        split = get_layout(weight) is not None
        return parameter_group(weight, group, "weight") if split or dist.is_initialized() or group is not None else None
    if tuple(weight.placements) != (Shard(0),):
        raise ValueError(
            f"a weight {list(weight.shape)} with placements {weight.placements} was given: a head's classes are split "
            "along dimension 0 of a one-dimensional mesh, (Shard(dim=0),)"
        )
    return parameter_group(weight, group, "weight")


def find_place(weight: torch.Tensor, classes: int | None, group: dist.ProcessGroup | None) -> Place:
    """This rank's part of the classes, given its rows of the weight.

    Args:
        classes: of all ranks; None if it is not known, and the ranks exchange how many rows they hold.

    Raises:
        ValueError: the weight does not have this rank's number of rows.
    """
    known = full_size(weight, 0)
    if known is not None:
        if classes not in (None, known):
            raise ValueError(f"num_classes={classes} was given with a weight of {known} classes: leave it out")
        classes = known
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    held = to_local(weight).size(0)
    if classes is None and group is not None and size > 1:
        widths = primitives.exchange_sizes(held, group, weight.device)
        return Place(sum(widths[:rank]), sum(widths), group)
    classes = held if classes is None else classes
    start, width = shard_range(classes, size, rank)
    if held != width:
        hint = ": it seems to be whole; cut it with tensorshard.slice(weight, ranks, 0)" if held == classes else ""
        raise ValueError(
            f"a weight of {held} rows was given to rank {rank} of {size}, which holds {width} of "
            f"{classes} classes{hint}"
        )
    return Place(start, classes, group)
