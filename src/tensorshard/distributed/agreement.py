"""What the ranks of a group tell each other before tensors of sizes unknown to the others travel."""

import torch
import torch.distributed as dist

from tensorshard.distributed import primitives
from tensorshard.distributed.groups import find_monitor
from tensorshard.distributed.sharding import shard_sizes

_MOST_DIMENSIONS = 16
_MAGIC = 0x7453_6841  # begins every description, so that the bytes of another collective are not taken for one
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def held_sizes(tensor: torch.Tensor, dim: int, size: int | None, group: dist.ProcessGroup, what: str) -> list[int]:
    """How many elements along `dim` each rank holds: by convention if the whole `size` is known, else asked.

    Args:
        dim: counted from the front.
        what: the collective that wants to know, for messages.

    Raises:
        ValueError: `size` is given and this rank does not hold its part of it; or it is asked, and the ranks' tensors
            differ in more than their size along `dim`. Every rank raises then.
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
        raise ValueError(
            f"{what} was given a tensor of {tensor.ndim} dimensions: at most {_MOST_DIMENSIONS} can travel"
        )
    monitor = find_monitor(group)
    if monitor is not None:
        monitor.check(f"{what} along dimension {dim} of {tensor.ndim}")
    padding = [0] * (_MOST_DIMENSIONS - tensor.ndim)
    mine = torch.tensor([_MAGIC, dtype, tensor.ndim, *tensor.shape, *padding], device=tensor.device)
    rows = primitives.gather_flat(mine, group).tolist()
    if all(row[0] == _MAGIC for row in rows):
        fixed = {(row[1], row[2], *row[3 : 3 + dim], *row[4 + dim :]) for row in rows}
        if len(fixed) == 1:
            return [row[3 + dim] for row in rows]
    ranks = dist.get_process_group_ranks(group)
    listing = "; ".join(f"rank {rank}: {_describe(row)}" for rank, row in zip(ranks, rows, strict=True))
    raise ValueError(
        f"{what} along dimension {dim} needs tensors that are equal but for their size along it; there are {listing}"
    )


def _describe(row: list[int]) -> str:
    if row[0] != _MAGIC:
        return "another collective"
    dtype = str(_DTYPES[row[1]]).removeprefix("torch.") if row[1] >= 0 else "another type"
    return f"{row[3 : 3 + row[2]]} {dtype}"
