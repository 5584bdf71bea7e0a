"""What ranks tell each other before they go on.

One rank decides for all: what it works out, or the error that it meets, is broadcast to the others. And ranks learn the
sizes of each other's tensors, before a collective that needs them.
"""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorshard.comm import primitives
from tensorshard.comm.collectives import all_reduce_, on_the_wire
from tensorshard.comm.groups import find_monitor
from tensorshard.comm.sharding import shard_sizes
from tensorshard.comm.world import world
from tensorshard.torch_private.process_groups import group_device

_Result = TypeVar("_Result")


_MOST_DIMENSIONS = 16
_MAGIC = 0x7453_6841  # begins every description, so that the bytes of another collective are not taken for one
_CALLS = ("gather", "gather_for_sum", "all_to_all")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def decide_once(decide: Callable[[], _Result], group: dist.ProcessGroup, *, rank: int = 0) -> _Result:
    """What ``decide()`` returns on one rank of `group`, on every rank. A collective of the group.

    The result travels by pickle, between processes of one job. Under the ``fake`` backend, where no other rank exists,
    each decides for itself.

    Args:
        decide: called on that rank alone.
        group: the ranks.
        rank: which of them decides, counted within the group.

    Raises:
        Exception: the error that ``decide()`` raised, of the same class and with the same message on every rank. If
            that error cannot be pickled, the other ranks raise a RuntimeError with its message.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return decide()
    outcome: list[Any] = [None]
    failure: Exception | None = None
    if group.rank() == rank:
        try:
            outcome = [(True, decide())]
        except Exception as error:
            failure = error
            outcome = [(False, error if _travels(error) else RuntimeError(f"{type(error).__name__}: {error}"))]
    dist.broadcast_object_list(outcome, group=group, group_src=rank)
    if failure is not None:
        raise failure  # with the traceback of where it happened
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value


def broadcast_first(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`tensor` as the group's first rank has it. A collective of the group.

    It is received into a copy: `tensor` may be the user's own memory.
    """
    tensor = tensor.contiguous() if group.rank() == 0 else tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(on_the_wire(tensor), group=group, group_src=0)
    return tensor


def succeed_together(action: Callable[[], _Result], group: dist.ProcessGroup, call: str) -> _Result:
    """What ``action()`` returns on this rank, once all ranks of `group` have succeeded. A collective of the group.

    Args:
        action: is no collective.
        call: what the user called, for the message.

    Raises:
        Exception: on a rank whose action raised, its error; on the others a RuntimeError that names the rank and the
            error.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return action()
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failure = error
    messages: list[Any] = [None] * group.size()
    dist.all_gather_object(messages, None if failure is None else f"{type(failure).__name__}: {failure}", group=group)
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            ranks = dist.get_process_group_ranks(group)
            raise RuntimeError(f"{call} failed on rank {ranks[rank]}, so it was not done on any: {message}")
    return result


def meet(call: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits until every rank of `group` makes the same `call`. If one does not come, the error names the call.

    Args:
        device: on which messages travel.
    """
    if group.size() > 1:
        all_reduce_(torch.zeros(1, device=device), group, what=call)


def check_same(given: Mapping[str, Mapping[str, Any]], group: dist.ProcessGroup, call: str) -> None:
    """Refuses arguments that differ between the ranks of `group`. A collective of the group.

    Args:
        given: the arguments to compare, by a word such as "plans". Each is a dict of its parts by name. Equal parts
            must have equal reprs.
        call: what the user called, for the message.

    Raises:
        ValueError: on every rank; names the first difference.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake" or world().is_simulated:
        return
    own = hashlib.sha256(repr(given).encode()).hexdigest()
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, own, group=group)
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * group.size()
    printed = {what: {name: str(value) for name, value in parts.items()} for what, parts in given.items()}
    dist.all_gather_object(everyone, printed, group=group)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    for what, parts in everyone[0].items():
        others = everyone[other][what]
        for name in {**parts, **others}:
            here, there = parts.get(name, "nothing"), others.get(name, "nothing")
            if here != there:
                raise ValueError(
                    f"{call} was given different {what} on different ranks: {name} is {here} on rank 0 and {there} on "
                    f"rank {other}; every rank calls it with the same"
                )


def _travels(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # such as an exception whose constructor needs more than its args
        return False


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
    device = group_device(group, tensor.device)
    mine = torch.tensor([*call, dtype, tensor.ndim, *tensor.shape, *padding], device=device)
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
