"""Split parameters, and tensors that are split like them: from shards to full tensors, and back.

Parallel layers hold marked plain tensors (:mod:`tensorshard.comm.marks`), which FSDP2 may have made DTensors of.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm import groups, primitives
from tensorshard.comm.marks import ParallelMark, get_layout, get_mark
from tensorshard.comm.sharding import distribute_like, normalize_dim, shard_range
from tensorshard.common.words import kind_of

_WHOSE = "_tensorshard_part"


def is_split(parameter: torch.Tensor) -> bool:
    """Whether each rank of a group holds its own shard of `parameter`, so that data parallelism must leave it alone.

    This is True for any DTensor, which data parallelism cannot average with plain tensors.
    """
    return isinstance(parameter, DTensor) or get_mark(parameter) is not None


def own_group(parameter: torch.Tensor) -> dist.ProcessGroup:
    """The ranks over which a split parameter is split.

    Raises:
        ValueError: a DTensor on a mesh of several dimensions.
        RuntimeError: a mark that names no group, and there is no model-parallel group.
    """
    if isinstance(parameter, DTensor):
        return groups.resolve_group(parameter.device_mesh)
    layout = get_layout(parameter)
    return groups.get_group() if layout is None or layout.group is None else layout.group


def gather_full(tensor: torch.Tensor, layout: ParallelMark | None) -> torch.Tensor:
    """The full tensor of which the ranks hold shards. Every rank of the group calls this.

    Args:
        tensor: this rank's shard; or a DTensor, which is gathered over its own mesh first, as FSDP2 splits shards
            further.
        layout: how the full tensor is cut; None if it is not.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if layout is None or layout.dim is None:
        return tensor
    group = _group_of(layout)
    if group.size() == 1:
        return tensor
    dim = normalize_dim(layout.dim, tensor.ndim)
    return primitives.gather_dim(tensor, dim, primitives.exchange_sizes(tensor.size(dim), group, tensor.device), group)


def own_shard(full: torch.Tensor, layout: ParallelMark | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's shard of `full`, in memory of its own.

    Args:
        layout: how `full` is cut; None if it is not.
        like: a tensor of the shape that the result must have. If it is a DTensor, so is the result.

    Raises:
        ValueError: `full` is not of the shape of which `like` is a shard.
    """
    if isinstance(full, DTensor):
        return full
    shard = full
    if layout is not None and layout.dim is not None:
        group = _group_of(layout)
        dim = normalize_dim(layout.dim, full.ndim)
        shard = full.narrow(dim, *shard_range(full.size(dim), group.size(), group.rank()))
        shard = shard.clone(memory_format=torch.contiguous_format)
    if like is None:
        return shard
    if shard.shape != like.shape or _is_of_another_size(full, layout):
        held = list(like.shape)
        if layout is not None and layout.dim is not None and layout.size is not None:
            held[layout.dim] = layout.size
        raise ValueError(f"a tensor of shape {list(full.shape)} was given where {held} is held")
    return distribute_like(shard, like) if isinstance(like, DTensor) else shard


def own_part(value: torch.Tensor, parameter: torch.Tensor, what: str) -> torch.Tensor:
    """This rank's shard of an optimizer state of a marked parameter, given as this shard or in full.

    A state of any other shape is returned as it is.

    Raises:
        ValueError: `value` is another rank's shard.
    """
    mark = get_mark(parameter)
    if mark is None or mark.dim is None or value.ndim != parameter.ndim or isinstance(value, DTensor):
        return value
    refuse_foreign_shard(value, own_group(parameter), what)
    full = list(parameter.shape)
    full[mark.dim] = full[mark.dim] if mark.size is None else mark.size
    is_full = value.shape != parameter.shape and list(value.shape) == full
    return own_shard(value, mark) if is_full else value


def _is_of_another_size(full: torch.Tensor, layout: ParallelMark | None) -> bool:
    known = layout is not None and layout.dim is not None and layout.size is not None
    return known and full.size(layout.dim) != layout.size  # type: ignore[union-attr, arg-type]


def _group_of(layout: ParallelMark) -> dist.ProcessGroup:
    return groups.get_group() if layout.group is None else layout.group


def check_tensor(tensor: object, what: str) -> None:
    """Refuses what is not a tensor.

    Args:
        what: the function that was given it, for the message.

    Raises:
        TypeError: it is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} was given {kind_of(tensor)}, where a tensor was expected")


def refuse_dtensor(tensor: torch.Tensor, what: str) -> None:
    """Refuses a DTensor where a collective needs a plain tensor, and what is not a tensor at all.

    Args:
        what: the function that was given it, for the message.

    Raises:
        TypeError: it is a DTensor, or not a tensor.
    """
    check_tensor(tensor, what)
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"{what} was given a DTensor {list(tensor.shape)} with placements {tensor.placements}: pass what this rank "
            "holds of it, tensor.to_local(), or all of it, tensor.full_tensor()"
        )


def local_of(tensor: DTensor, dim: int, group: groups.Group | None) -> tuple[torch.Tensor, dist.ProcessGroup, int]:
    """This rank's shard of a DTensor that is split along `dim`, its group, and the size of the full tensor along `dim`.

    Raises:
        ValueError: it is not split along `dim`, or over other ranks than those of `group`.
    """
    axis = normalize_dim(dim, tensor.ndim)
    placement = tensor.placements[0]
    if len(tensor.placements) != 1 or not isinstance(placement, Shard) or placement.dim != axis:
        raise ValueError(
            f"gather along dimension {dim} was given a DTensor {list(tensor.shape)} with placements "
            f"{tensor.placements}, which is not split along it alone: tensor.full_tensor() is all of it"
        )
    own = tensor.device_mesh.get_group()
    held = dist.get_process_group_ranks(own)
    if group is not None and dist.get_process_group_ranks(groups.resolve_group(group)) != held:
        raise ValueError(f"a DTensor is split over the ranks {held}, and group= names other ranks: leave group= out")
    return tensor.to_local(), own, tensor.size(axis)


def say_whose(shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Notes on a tensor of a state dict which rank's shard it is; ``torch.save`` keeps the note."""
    if group.size() > 1:
        setattr(shard, _WHOSE, (group.rank(), group.size()))


def refuse_foreign_shard(tensor: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    """Refuses a shard that another rank has saved.

    Raises:
        ValueError: :func:`say_whose` has noted another rank on it.
    """
    saved = getattr(tensor, _WHOSE, None)
    if saved is not None and saved != (group.rank(), group.size()):
        raise ValueError(
            f"{what} holds part {saved[0]} of {saved[1]}, saved by another rank; this one has part {group.rank()} of "
            f"{group.size()}. A state dict of split parameters has the saver's parts alone: save what "
            "tensorshard.collect_state_dict(x) returns, called on every rank, and load "
            "tensorshard.relocate_state_dict(x, state)"
        )
