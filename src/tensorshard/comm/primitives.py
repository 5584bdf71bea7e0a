"""Collectives on tensors split along any dimension, evenly or not. Nothing here is differentiable.

The module `collectives` moves flat buffers; the functions here cut, pad and concatenate. If the group has a monitor, it
checks every call first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into, all_reduce_, reduce_scatter_into
from tensorshard.comm.groups import find_monitor
from tensorshard.comm.world import world
from tensorshard.torch_private.process_groups import group_device


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Sums `tensor` over the ranks, in place."""
    if group.size() == 1:
        return None
    _announce("all_reduce", tensor, group)
    return all_reduce_(tensor, group, async_op=async_op)


def gather_flat(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's `tensor`, of the same shape on all, stacked: [ranks, *shape]."""
    if group.size() == 1:
        return tensor[None]
    _announce("all_gather", tensor, group)
    tensor = tensor.contiguous()
    output = tensor.new_empty((group.size(), *tensor.shape))
    if tensor.numel():
        all_gather_into(output.view(-1), tensor.view(-1), group)
    return output


def exchange_sizes(size: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The `size` that each rank passed. In an estimate, all pass the same.

    Args:
        device: where it travels, if the group has a backend there. From a GPU it is read.
    """
    sizes = gather_flat(torch.tensor([size], device=group_device(group, device)), group).flatten()
    return list(world().known(sizes, [size] * group.size()))


@dataclass
class Started:
    """A collective under way."""

    work: dist.Work | None
    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """Waits for it, and returns its result."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


def gather_dim(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenates the ranks' tensors along `dim`, where rank i's has ``sizes[i]`` elements."""
    return start_gather_dim(tensor, dim, sizes, group, async_op=False).wait()


def start_gather_dim(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup, *, async_op: bool = True
) -> Started:
    """Starts what :func:`gather_dim` does, and returns at once."""
    widest = max(sizes)
    padding = widest - tensor.size(dim)
    if padding:
        shape = list(tensor.shape)
        shape[dim] = padding
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    tensor = tensor.contiguous()
    stacked = tensor.new_empty((group.size(), *tensor.shape))
    work = None
    if group.size() == 1:
        stacked[0].copy_(tensor)
    else:
        _announce("all_gather", tensor, group)
        if tensor.numel():
            work = all_gather_into(stacked.view(-1), tensor.view(-1), group, async_op=async_op)

    def finish() -> torch.Tensor:
        even = min(sizes) == widest
        if even and (dim == 0 or all(size == 1 for size in tensor.shape[:dim])):
            shape = list(tensor.shape)
            shape[dim] = sum(sizes)
            return stacked.view(shape)
        return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(stacked, sizes, strict=True)], dim)

    return Started(work, finish)


def slice_dim(tensor: torch.Tensor, dim: int, sizes: Sequence[int], rank: int) -> torch.Tensor:
    """A copy of shard `rank` of `tensor`, which is cut along `dim` into shards of `sizes`."""
    shard = tensor.narrow(dim, sum(sizes[:rank]), sizes[rank])
    return shard.clone(memory_format=torch.contiguous_format)


def reduce_scatter_dim(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sums `tensor` over the ranks and returns this rank's shard along `dim`."""
    return start_reduce_scatter_dim(tensor, dim, sizes, group, async_op=False).wait()


def start_reduce_scatter_dim(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup, *, async_op: bool = True
) -> Started:
    """Starts what :func:`reduce_scatter_dim` does, and returns at once."""
    widest = max(sizes)
    shape = list(tensor.shape)
    shape[dim] = widest
    stacked = _stacked_shards(tensor, dim, sizes, widest)
    _announce("reduce_scatter", stacked, group)
    output = tensor.new_empty(shape)
    work = None
    if output.numel():
        work = reduce_scatter_into(output.view(-1), stacked.view(-1), group, async_op=async_op)

    def finish() -> torch.Tensor:
        mine = sizes[group.rank()]
        return output if mine == widest else output.narrow(dim, 0, mine).contiguous()

    return Started(work, finish)


def _stacked_shards(tensor: torch.Tensor, dim: int, sizes: Sequence[int], widest: int) -> torch.Tensor:
    """One padded shard per rank, one after the other, as reduce-scatter takes them."""
    if min(sizes) == widest and (dim == 0 or all(size == 1 for size in tensor.shape[:dim])):
        return tensor.contiguous()  # cut evenly along its outermost dimension, it is that already
    shape = list(tensor.shape)
    shape[dim] = widest
    stacked = tensor.new_empty((len(sizes), *shape))
    for slot, shard in zip(stacked, tensor.split(list(sizes), dim), strict=True):
        held = shard.size(dim)
        slot.narrow(dim, 0, held).copy_(shard)
        if held < widest:
            slot.narrow(dim, held, widest - held).zero_()
    return stacked


def all_to_all_dims(
    tensor: torch.Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Sends shard i of `tensor`, cut along `split_dim`, to rank i; concatenates what arrives along `concat_dim`."""
    monitored = tensor.new_empty(0)  # ranks may pass different amounts: only the call itself is compared
    _announce(f"all_to_all({split_dim}, {concat_dim})", monitored, group)
    outgoing = tensor.split(list(split_sizes), split_dim)
    shapes = []
    for size in concat_sizes:
        shape = list(tensor.shape)
        shape[split_dim] = split_sizes[group.rank()]
        shape[concat_dim] = size
        shapes.append(torch.Size(shape))
    incoming = tensor.new_empty(sum(shape.numel() for shape in shapes))
    dist.all_to_all_single(  # as bytes: Gloo does not know every type
        incoming.view(torch.uint8),
        torch.cat([shard.reshape(-1) for shard in outgoing]).view(torch.uint8),
        [shape.numel() * tensor.element_size() for shape in shapes],
        [shard.numel() * tensor.element_size() for shard in outgoing],
        group=group,
    )
    received = incoming.split([shape.numel() for shape in shapes])
    return torch.cat([shard.view(shape) for shard, shape in zip(received, shapes, strict=True)], concat_dim)


def start_exchange(
    outgoing: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], like: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], list[torch.Tensor]]:
    """Starts sending ``outgoing[r]`` to rank r. Ranks may exchange any amounts.

    Args:
        outgoing: for each rank, flat tensors of the type of `like`, which travel one after the other.
        sizes: how many elements each rank sends to this one.

    Returns:
        A function that waits, and returns what each rank has sent.
    """
    _announce("exchange", like.new_empty(0), group)
    message = torch.cat([part for parts in outgoing for part in parts] or [like.new_empty(0)])
    incoming = like.new_empty(sum(sizes))
    itemsize = like.element_size()
    work = dist.all_to_all_single(  # as bytes: Gloo does not know every type
        incoming.view(torch.uint8),
        message.view(torch.uint8),
        [size * itemsize for size in sizes],
        [sum(part.numel() for part in parts) * itemsize for parts in outgoing],
        group=group,
        async_op=True,
    )

    def finish() -> list[torch.Tensor]:
        nonlocal message
        if work is not None:
            work.wait()
        del message  # which had to outlive the transfer
        return list(incoming.split(list(sizes)))

    return finish


def exchange_among(pieces: torch.Tensor, together: int, group: dist.ProcessGroup) -> torch.Tensor:
    """An all-to-all within every `together` neighbouring ranks of `group`: ``pieces[i]`` goes to the i-th of them.

    Args:
        pieces: [together, *], of the same shape on all ranks.

    Returns:
        [together, *]: the pieces that these ranks had for this one.
    """
    _announce("exchange_among", pieces, group)
    first = group.rank() // together * together
    nbytes = pieces[0].numel() * pieces.element_size()
    splits = [nbytes if first <= rank < first + together else 0 for rank in range(group.size())]
    received = pieces.new_empty(pieces.shape)
    dist.all_to_all_single(  # as bytes: Gloo does not know every type
        received.view(-1).view(torch.uint8), pieces.contiguous().view(-1).view(torch.uint8), splits, splits, group=group
    )
    return received


def _announce(call: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Has the group's monitor compare this call with the other ranks'."""
    monitor = find_monitor(group)
    if monitor is not None:
        monitor.check(f"{call} of {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
