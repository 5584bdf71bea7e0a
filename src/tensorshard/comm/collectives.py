"""Collectives by the fastest primitive that a backend has.

NCCL's own collectives are the fastest there are. Gloo's are not: it moves 64 MB between two ranks in 17 ms with a pair
of sends and receives, but takes 62 ms for an all-gather and 78 ms for a reduce-scatter of the same bytes (torch 2.13,
loopback). So on Gloo these are built from sends and receives here. Sums are then taken in fp32 by the rank that keeps
them, in the order of the ranks, so that they do not depend on timing.

Every send and receive carries a tag made of what the call is for and of its size. So calls that do not belong together
never meet: Gloo ends the process where a message is larger than the room for it. They wait instead, until the group's
timeout, and then say what they were.

Also here: collectives on several tensors at once.

On NCCL they are one call: one kernel, one wait in its queue. On Gloo, which moves no byte sooner for that, they are one
call a tensor, so that no tensor has to be copied into a message.
"""

import logging
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tensorshard.comm.groups import CollectiveMismatchError
from tensorshard.common.never_compiled import never_compiled
from tensorshard.torch_private.coalescing import coalesced
from tensorshard.torch_private.process_groups import (
    backend_name,
    collective_of_frame,
    group_device,
    group_timeout,
    is_nccl,
)
from tensorshard.torch_private.tensors import storage_address

logger = logging.getLogger("tensorshard")

# Up to this many bytes an all-reduce sends every rank's tensor to every other: one hop instead of two. Between two
# ranks that moves no byte more; all that it costs is memory for the other's tensor, and a sum that both compute.
_SMALL_BYTES = 1 << 16
_SMALL_BYTES_OF_PAIR = 1 << 21

# How long the rest of a failed step is waited for.
_PATIENCE = timedelta(seconds=20)

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_KNOWN = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
"""The types that both Gloo and NCCL move. Others are moved as bytes."""


def on_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor`, which is contiguous, of a type that Gloo and NCCL move: flat bytes if its own is not."""
    return tensor if tensor.dtype in _KNOWN else tensor.detach().view(-1).view(torch.uint8)


def is_sent_whole(nbytes: float, ranks: int) -> bool:
    """Whether an all-reduce of so many bytes sends every rank's tensor to every other."""
    return nbytes <= (_SMALL_BYTES_OF_PAIR if ranks == 2 else _SMALL_BYTES)


class _Pending(dist.Work):
    """Point-to-point transfers under way, and what follows once they have arrived.

    A stage is called when the transfers before it are over; it returns the transfers that it starts in turn.
    """

    def __init__(
        self,
        call: "_Call",
        transfers: list[Any],
        stages: Sequence[Callable[[], list[Any]]] = (),
        keep: Any = None,
    ) -> None:
        super().__init__()
        self._call = call
        self._transfers = transfers
        self._stages = deque(stages)
        self._keep = keep  # buffers must outlive their transfers

    def advance(self, timeout: timedelta | None = None) -> None:
        """Waits for what is under way and starts what follows."""
        transfers, self._transfers = self._transfers, []
        patience = timeout or (self._call.timeout() if transfers else None)
        try:
            for transfer in transfers:
                transfer.wait(patience)
        except RuntimeError as error:
            self._stages.clear()
            raise self._call.failed(error) from error
        if self._stages:
            self._transfers = self._stages.popleft()()
        if not self._transfers:
            self._keep = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self._transfers or self._stages:
            self.advance(timeout)
        return True

    def __del__(self) -> None:
        # Gloo would end the connection of a transfer whose buffer goes away, and the group's next call would hang.
        if self._transfers and not sys.is_finalizing():
            finish_unasked(self)


class _Call:
    """A collective that is made of sends and receives.

    Args:
        what: names the tensor in errors, the same on all ranks; "" for the name of the collective alone.
        nbytes: of the full tensor, the same on all ranks.
        waits: whether the caller waits until it is over.
    """

    under_way: "ClassVar[_Call | None]" = None
    """The collective whose send or receive is being made."""
    made: ClassVar[int] = 0
    """How many there were in this process."""

    def __init__(self, name: str, what: str, nbytes: int, group: dist.ProcessGroup, waits: bool) -> None:
        self.name, self.waits = name, waits
        _Call.made += 1
        self._description = f"{name} of {what} ({nbytes} bytes)" if what else f"{name} of {nbytes} bytes"
        self.group = group
        self.tag = zlib.crc32(self._description.encode()) >> 1 | 1  # a positive int of 31 bits; torch's own is 0

    def describe(self) -> str:
        """Its name, what it is of and its size: the same on all ranks that make the same call."""
        return self._description

    def send(self, tensor: torch.Tensor, rank: int, stage: int = 0) -> Any:
        _Call.under_way = self
        try:
            return self.group.send([tensor], rank, self.tag ^ (stage << 1))
        finally:
            _Call.under_way = None

    def receive(self, tensor: torch.Tensor, rank: int, stage: int = 0) -> Any:
        _Call.under_way = self
        try:
            return self.group.recv([tensor], rank, self.tag ^ (stage << 1))
        finally:
            _Call.under_way = None

    def timeout(self) -> timedelta:
        """The group's timeout. Gloo's sends and receives would miss one that was set after the group was made."""
        return group_timeout(self.group, torch.device("cpu"))

    def failed(self, error: RuntimeError) -> CollectiveMismatchError:
        """The error to raise in place of Gloo's `error`."""
        ranks = dist.get_process_group_ranks(self.group)
        cause = (str(error).splitlines() or ["no reason given"])[0]
        mismatch = CollectiveMismatchError(
            f"rank {ranks[self.group.rank()]} could not finish the {self._description} over the ranks {ranks}, as "
            f"another rank has failed, has ended its loop (a stream with fewer batches, say), has made another call, "
            f"or took a branch without this one. Every rank of a group must make the same calls in the same order: do "
            f"not compute on split or sharded tensors under an `if rank == 0`, or depending on a rank's own data, and "
            f"take equally many batches on every rank. Its transfer ended with: {cause}"
        )
        for explain in explainers:
            explain(mismatch)
        return mismatch


def awaited(frame: FrameType | None) -> tuple[str, dist.ProcessGroup] | None:
    """The collective that a thread waits in, by its innermost `frame`, and its group; None if it is in none.

    Sends and receives between stages of a pipeline are no collectives.
    """
    while frame is not None:
        own = frame.f_locals.get("self")
        call = own._call if isinstance(own, _Pending) else own
        if isinstance(call, _Call) and hasattr(call, "tag"):  # else it is still being made
            return call.describe(), call.group
        made = collective_of_frame(frame)
        if made is not None:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in made[2])
            return f"{made[0]}{f' of shapes {shapes}' if shapes else ''}", made[1]
        frame = frame.f_back
    return None


def collectives_made() -> int:
    """How many collectives of sends and receives this process has begun."""
    return _Call.made


explainers: list[Callable[[RuntimeError], None]] = []
"""Called with the error of a collective that could not end: who knows what the other ranks do notes that at it."""


def collective_under_way() -> tuple[str, bool] | None:
    """While a send or a receive is made: its collective, and whether the caller waits until that is over."""
    call = _Call.under_way
    return None if call is None else (call.name, call.waits)


def advance(work: dist.Work | None) -> None:
    """Lets a collective of several stages start its next stage. Other collectives advance by themselves."""
    if isinstance(work, _Pending):
        work.advance()


def finish_unasked(work: dist.Work) -> None:
    """Finishes a collective whose result is no longer needed, so that the next one does not meet its messages.

    This is called after a failure, or when the Engine that began the collective is gone. If that happened on all ranks,
    all of them finish it here. If it happened on one rank alone, that rank waits only briefly: the others will not
    come, and its own error has to be seen.
    """
    if not isinstance(work, _Pending):
        return  # a collective of the backend, which finishes by itself
    try:
        work.wait(_PATIENCE)
    except RuntimeError as error:
        logger.warning("a collective that was begun and not waited for: %s", error)


@never_compiled  # torch 2.13 cannot look into process groups
def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on `device` travel through Gloo in `group`, and may do so as sends and receives.

    Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` they may not: torch then compares the ranks' collectives, but not their
    sends and receives.
    """
    if device.type != "cpu" or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return False
    return backend_name(group, device) == "gloo"


@contextmanager
def on_group_device(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """`tensor`, or where `group` has no backend for its device, as a world of NCCL alone has none for CPUs, a copy on a
    device that it has. At the end, `tensor` has the copy's values."""
    device = group_device(group, tensor.device)
    if device == tensor.device:
        yield tensor
        return
    copy = tensor.to(device)
    yield copy
    tensor.copy_(copy)


def broadcast_(tensor: torch.Tensor, group: dist.ProcessGroup, group_src: int = 0) -> None:
    """Gives `tensor` on all ranks the values that it has on rank `group_src` of `group`, in place.

    The group needs no backend for the tensor's device.
    """
    with torch.no_grad(), on_group_device(tensor.detach(), group) as sent:
        whole = sent.contiguous()
        dist.broadcast(on_the_wire(whole), group=group, group_src=group_src)
        if whole is not sent:
            sent.copy_(whole)


def all_gather_into(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False, *, what: str = ""
) -> dist.Work | None:
    """Concatenates every rank's `input` into `output`, both flat; `input` may be this rank's shard of `output`.

    Args:
        what: names the tensor in errors, the same on all ranks. Calls with different names never meet.
    """
    if not is_gloo(group, output.device):
        return dist.all_gather_single(on_the_wire(output), on_the_wire(input), group=group, async_op=async_op)
    rank, size = group.rank(), group.size()
    shards = list(output.view(-1).chunk(size))
    source = input.view(-1)
    if not _is_same_memory(shards[rank], source):
        shards[rank].copy_(source)
    call = _Call("all_gather", what, output.nbytes, group, not async_op)
    pending = _Pending(call, _exchange_shards(shards, rank, call), keep=output)
    return _done_or_pending(pending, async_op)


def reduce_scatter_into(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
    *,
    what: str = "",
) -> dist.Work | None:
    """Sums (or averages) `input` over the ranks and leaves this rank's shard in `output`; both contiguous.

    Args:
        what: as for :func:`all_gather_into`.
    """
    if not is_gloo(group, output.device):
        return dist.reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)
    _check_sum_or_average(op)
    rank, size = group.rank(), group.size()
    shards = list(input.view(-1).chunk(size))
    call = _Call("reduce_scatter", what, input.nbytes, group, not async_op)
    transfers, received = _collect_shard(shards, rank, call)

    def finish() -> list[Any]:
        _sum_into(output.view(-1), received, op)
        return []

    return _done_or_pending(_Pending(call, transfers, [finish], keep=(input, received)), async_op)


def all_reduce_(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
    *,
    what: str = "",
) -> dist.Work | None:
    """Reduces `tensor` over the ranks, in place.

    Args:
        what: as for :func:`all_gather_into`.
    """
    rank, size = group.rank(), group.size()
    small = is_sent_whole(tensor.nbytes, size)
    ours = op in _SUMS or (op == dist.ReduceOp.MAX and small)
    if not ours or not tensor.is_contiguous() or not is_gloo(group, tensor.device):
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    flat = tensor.detach().view(-1)
    call = _Call("all_reduce", what, tensor.nbytes, group, not async_op)
    if small:
        copies = [flat if r == rank else torch.empty_like(flat) for r in range(size)]

        def finish() -> list[Any]:
            if op == dist.ReduceOp.MAX:
                flat.copy_(torch.stack(copies).amax(0))
            else:
                _sum_into(flat, copies, op)
            return []

        return _done_or_pending(_Pending(call, _exchange_shards(copies, rank, call), [finish], keep=copies), async_op)

    shards = list(flat.tensor_split(size))
    transfers, received = _collect_shard(shards, rank, call)

    def reduce_own() -> list[Any]:
        _sum_into(shards[rank], received, op)
        return _exchange_shards(shards, rank, call, stage=1)

    return _done_or_pending(_Pending(call, transfers, [reduce_own], keep=(tensor, received)), async_op)


def _collect_shard(shards: list[torch.Tensor], rank: int, call: _Call) -> tuple[list[Any], list[torch.Tensor]]:
    """Sends shard r to rank r; returns the transfers and every rank's version of this rank's shard, in their order."""
    others = _others(rank, call.group.size())
    received = [shard if r == rank else torch.empty_like(shards[rank]) for r, shard in enumerate(shards)]
    transfers = [call.receive(received[r], r) for r in others]
    transfers += [call.send(shards[r], r) for r in others]
    return transfers, received


def _exchange_shards(shards: list[torch.Tensor], rank: int, call: _Call, stage: int = 0) -> list[Any]:
    """Sends this rank's shard to all and fills the others with theirs."""
    others = _others(rank, len(shards))
    transfers = [call.receive(shards[r], r, stage) for r in others]
    return transfers + [call.send(shards[rank], r, stage) for r in others]


def _sum_into(output: torch.Tensor, terms: list[torch.Tensor], op: Any) -> None:
    """The sum of `terms` in their order (one of them may be `output` itself), in fp32 or wider if floating."""
    narrow = output.dtype in (torch.float16, torch.bfloat16)
    if len(terms) == 2 and not narrow:  # in one pass over memory
        torch.add(terms[0], terms[1], out=output)
        total = output
    else:
        total = terms[0].float() if narrow else terms[0].clone()
        for term in terms[1:]:
            total.add_(term)
    if op == dist.ReduceOp.AVG:
        total.div_(len(terms))
    if total is not output:
        output.copy_(total)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both begin at the same element of one storage. Fake tensors have storages, too, but no addresses."""
    storages = storage_address(one.untyped_storage()), storage_address(other.untyped_storage())
    return storages[0] == storages[1] and one.storage_offset() == other.storage_offset()


def _others(rank: int, size: int) -> list[int]:
    """The other ranks. Each rank begins with its successor, so that not all begin with the same one."""
    return [(rank + step) % size for step in range(1, size)]


def _done_or_pending(pending: _Pending, async_op: bool) -> dist.Work | None:
    if async_op:
        return pending
    pending.wait()
    return None


def _check_sum_or_average(op: Any) -> None:
    if op not in _SUMS:
        raise ValueError(f"reduce_scatter_into was given {op}; it sums (ReduceOp.SUM) or averages (ReduceOp.AVG)")


class Started:
    """Collectives under way. Whoever reads their outputs waits for them first.

    Args:
        tensors: what they read and write, which is kept until then.
    """

    def __init__(self, works: Sequence[Any], tensors: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self._works:
            work.wait()
        self._tensors = ()

    def advance(self) -> None:
        """See :func:`~tensorshard.comm.collectives.advance`."""
        for work in self._works:
            advance(work)

    def abandon(self) -> None:
        """See :func:`~tensorshard.comm.collectives.finish_unasked`."""
        for work in self._works:
            finish_unasked(work)


def all_reduce_several(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, what: str) -> Started:
    """Starts to sum each of `tensors` over the ranks, in place.

    Args:
        tensors: flat.
        what: as for :func:`~tensorshard.comm.collectives.all_gather_into`.
    """
    return _started([(tensor,) for tensor in tensors], group, lambda tensor: _reduced(tensor, group, what))


def reduce_scatter_several(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, what: str
) -> Started:
    """Starts to sum each of `inputs` over the ranks, of which this rank's shard comes into its output.

    Args:
        outputs, inputs: flat.
        what: as for :func:`~tensorshard.comm.collectives.all_gather_into`.
    """
    pairs = list(zip(outputs, inputs, strict=True))
    return _started(
        pairs, group, lambda output, input: reduce_scatter_into(output, input, group, async_op=True, what=what)
    )


def all_gather_several(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, what: str = ""
) -> Started:
    """Starts to gather each of `inputs` from all ranks into its output.

    Args:
        outputs, inputs: flat. An input may be this rank's shard of its output.
        what: as for :func:`~tensorshard.comm.collectives.all_gather_into`.
    """
    pairs = list(zip(outputs, inputs, strict=True))
    return _started(pairs, group, lambda output, input: all_gather_into(output, input, group, async_op=True, what=what))


def _reduced(tensor: torch.Tensor, group: dist.ProcessGroup, what: str) -> Any:
    return all_reduce_(tensor, group, async_op=True, what=what)


def _started(calls: Sequence[tuple[torch.Tensor, ...]], group: dist.ProcessGroup, start: Any) -> Started:
    """Calls `start` with each of `calls`; those of one type are one call where the backend has that."""
    if len(calls) < 2 or not _coalesces(group, calls[0][0].device):
        return Started([start(*call) for call in calls], calls)
    works = []
    for dtype in dict.fromkeys(call[0].dtype for call in calls):
        members = [call for call in calls if call[0].dtype == dtype]
        works.append(coalesced(lambda members=members: [start(*call) for call in members], group))  # type: ignore[misc]
    return Started(works, calls)


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether several collectives of `group` are one. Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares them one
    by one."""
    return is_nccl(group, device) and dist.get_debug_level() != dist.DebugLevel.DETAIL
