"""Parameters of which each rank holds a part, and tensors laid out like them: whole from parts, and back.

Two kinds: DTensors, which is what the parallel layers hold, and plain tensors that somebody has marked with
:func:`tensorshard.register_parallel_dim`.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm import groups, primitives
from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharding import distribute_like, normalize_dim, shard_range


def is_split(parameter: torch.Tensor) -> bool:
    """Whether `parameter` belongs to a model-parallel layer, which looks after it: data parallelism must not.

    True also of a parameter that such a layer holds whole on every rank, as a replicated DTensor.
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
    mark = get_mark(parameter)
    return groups.get_group() if mark is None or mark.group is None else mark.group


def gather_full(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that is cut as `parameter` is. Every rank of its group calls this."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    mark = get_mark(parameter)
    if mark is None:
        return tensor
    group = own_group(parameter)
    dim = normalize_dim(mark.dim, tensor.ndim)
    return primitives.gather_dim(tensor, dim, primitives.exchange_sizes(tensor.size(dim), group, tensor.device), group)


def own_shard(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `whole` if that is cut as `parameter` is: a DTensor if `parameter` is one.

    Raises:
        ValueError: a DTensor has another shape than `whole`.
    """
    if isinstance(parameter, DTensor):
        return whole if isinstance(whole, DTensor) else distribute_like(whole, parameter)
    mark = get_mark(parameter)
    if mark is None:
        return whole
    group = own_group(parameter)
    dim = normalize_dim(mark.dim, whole.ndim)
    return whole.narrow(dim, *shard_range(whole.size(dim), group.size(), group.rank())).clone()


def check_tensor(tensor: object, what: str) -> None:
    """Raises for what is no tensor.

    Raises:
        TypeError: it is none; `what` was given it.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} was given a {type(tensor).__name__}, where a tensor was expected")


def refuse_dtensor(tensor: torch.Tensor, what: str) -> None:
    """Raises for a DTensor where a collective needs a plain tensor, and for what is no tensor at all.

    Raises:
        TypeError: it is one.
    """
    check_tensor(tensor, what)
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"{what} was given a DTensor {list(tensor.shape)} with placements {tensor.placements}, such as a parameter "
            "of a parallel layer or its gradient: pass what this rank holds of it, tensor.to_local(), or all of it, "
            "tensor.full_tensor()"
        )


def local_of(tensor: DTensor, dim: int, group: groups.Group | None) -> tuple[torch.Tensor, dist.ProcessGroup, int]:
    """This rank's part of a DTensor that is split along `dim`, its group, and the size of the whole along `dim`.

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
        raise ValueError(f"a DTensor split over the ranks {held} was given with group= other ranks: leave group= out")
    return tensor.to_local(), own, tensor.size(axis)


def refuse_foreign_part(tensor: DTensor, what: str) -> None:
    """Raises for a DTensor that another rank has saved, and that this one has loaded as if it were its own.

    Raises:
        ValueError: it is one: its mesh, which was saved with it, says whose part it holds.
    """
    mesh = tensor.device_mesh
    own = (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist()
    saved_by = mesh.get_coordinate()
    if saved_by is not None and own and list(saved_by) != own:
        raise ValueError(
            f"{what} holds part {saved_by[0]} of {mesh.size()}, saved by another rank; this one has part {own[0]}. "
            "A state dict of split parameters has the saver's parts alone: save tensorshard.collect_state_dict(x), "
            "called on every rank, and load tensorshard.relocate_state_dict(x, state)"
        )
