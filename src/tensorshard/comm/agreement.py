"""How the ranks of a group learn the sizes of each other's tensors, before a collective that needs them."""

import torch
import torch.distributed as dist

from tensorshard.comm import primitives
from tensorshard.comm.groups import find_monitor
from tensorshard.comm.sharding import shard_sizes

_MOST_DIMENSIONS = 16
_MAGIC = 0x7453_6841  # begins every description, so that the bytes of another collective are not taken for one
_CALLS = ("gather", "gather_for_sum", "all_to_all")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def held_sizes(tensor: torch.Tensor, dim: int, size: int | None, group: dist.ProcessGroup, what: str) -> list[int]:
    """How many elements along `dim` each rank holds.

    Args:
        dim: counted from the front.
        size: of the full tensor along `dim`, cut as `sharding` says; None: the ranks exchange their sizes.
        what: the collective that needs the sizes: gather, gather_for_sum, or all_to_all.

    Raises:
        ValueError: `size` is given and this rank does not hold its part of it. Without `size`, on every rank: the ranks
            make different calls, or their tensors differ in more than their size along `dim`.
    """
    if size is None:
        return _ask(tensor, dim, group, what)
    sizes = shard_sizes(size, group.size())
    if tensor.size(dim) != sizes[group.rank()]:
        raise ValueError(
            f"size={size} along dimension {dim} was given, of which rank {group.rank()} of {group.size()} "
            f"holds {sizes[group.rank()]} elements; its tensor {list(tensor.shape)} has {tensor.size(dim)}"
        )
    return sizes


def _ask(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, what: str) -> list[int]:
    dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else -1
    if tensor.ndim > _MOST_DIMENSIONS:
        raise ValueError(f"{what} was given a tensor of {tensor.ndim} dimensions: it takes at most {_MOST_DIMENSIONS}")
    monitor = find_monitor(group)
    if monitor is not None:
        monitor.check(f"{what} along dimension {dim} of {tensor.ndim}")
    padding = [0] * (_MOST_DIMENSIONS - tensor.ndim)
    call = (_MAGIC, _CALLS.index(what), dim)
    mine = torch.tensor([*call, dtype, tensor.ndim, *tensor.shape, *padding], device=tensor.device)
    rows = primitives.gather_flat(mine, group).tolist()
    ranks = dist.get_process_group_ranks(group)
    if {tuple(row[:3]) for row in rows} != {call}:
        listing = "; ".join(f"rank {rank}: {_describe_call(row)}" for rank, row in zip(ranks, rows, strict=True))
        raise ValueError(f"the ranks of a group made different calls: {listing}")
    if len({(*row[3 : 5 + dim], *row[6 + dim :]) for row in rows}) != 1:
        listing = "; ".join(f"rank {rank}: {_describe_tensor(row)}" for rank, row in zip(ranks, rows, strict=True))
        raise ValueError(
            f"{what} along dimension {dim} needs tensors that are equal but for their size along it; there are "
            f"{listing}"
        )
    return [row[5 + dim] for row in rows]


def _describe_call(row: list[int]) -> str:
    if row[0] != _MAGIC:
        return "another collective"
    return f"{_CALLS[row[1]]} along dimension {row[2]} of {_describe_tensor(row)}"


def _describe_tensor(row: list[int]) -> str:
    dtype = str(_DTYPES[row[3]]).removeprefix("torch.") if row[3] >= 0 else "another type"
    return f"{row[5 : 5 + row[4]]} {dtype}"
