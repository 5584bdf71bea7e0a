"""Collectives by the fastest primitive that a backend has.

NCCL's own collectives are the fastest there are. Gloo's are not: it moves 64 MB between two ranks in 17 ms with a pair
of sends and receives, but takes 62 ms for an all-gather and 78 ms for a reduce-scatter of the same bytes (torch 2.13,
loopback). So on Gloo these are built from sends and receives here. Sums are then taken in fp32 by the rank that keeps
them, in the order of the ranks, so that they do not depend on timing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorshard._compat import all_gather_single, reduce_scatter_single
from tensorshard.torch_private.process_groups import backend_name

# Up to this many bytes an all-reduce sends every rank's tensor to every other: one hop instead of two. Between two
# ranks that moves no byte more; all that it costs is memory for the other's tensor, and a sum that both compute.
_SMALL_BYTES = 1 << 16
_SMALL_BYTES_OF_PAIR = 1 << 21

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class _Pending(dist.distributed_c10d.Work):
    """Point-to-point transfers under way, and what follows once they have arrived.

    A stage is called when the transfers before it are over; it returns the transfers that it starts in turn.
    """

    def __init__(self, transfers: list[Any], stages: Sequence[Callable[[], list[Any]]] = (), keep: Any = None):
        super().__init__()
        self._transfers = transfers
        self._stages = deque(stages)
        self._keep = keep  # buffers must outlive their transfers

    def advance(self) -> None:
        """Waits for what is under way and starts what follows."""
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            transfer.wait()
        if self._stages:
            self._transfers = self._stages.popleft()()
        if not self._transfers:
            self._keep = None

    def wait(self, timeout: Any = None) -> bool:
        while self._transfers or self._stages:
            self.advance()
        return True


def advance(work: dist.Work | None) -> None:
    """Gives a collective that goes in several stages the chance to start its next; others advance by themselves."""
    if isinstance(work, _Pending):
        work.advance()


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on `device` travel through Gloo in `group`, and may do so as sends and receives.

    Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` they may not: torch compares what the ranks call for collectives alone.
    """
    if device.type != "cpu" or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return False
    return backend_name(group, device) == "gloo"


def all_gather_into(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Concatenates every rank's `input` into `output`, both flat; `input` may be this rank's part of `output`."""
    if not is_gloo(group, output.device):
        return all_gather_single(output, input, group=group, async_op=async_op)
    rank, size = group.rank(), group.size()
    parts = list(output.view(-1).chunk(size))
    source = input.view(-1)
    if parts[rank].data_ptr() != source.data_ptr():
        parts[rank].copy_(source)
    pending = _Pending(_exchange_parts(parts, rank, group), keep=output)
    return _done_or_pending(pending, async_op)


def reduce_scatter_into(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Sums (or averages) `input` over the ranks and leaves this rank's part in `output`; both contiguous."""
    if not is_gloo(group, output.device):
        return reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)
    _check_sum_or_average(op)
    rank, size = group.rank(), group.size()
    parts = list(input.view(-1).chunk(size))
    transfers, received = _collect_part(parts, rank, group)

    def finish() -> list[Any]:
        _sum_into(output.view(-1), received, op)
        return []

    return _done_or_pending(_Pending(transfers, [finish], keep=(input, received)), async_op)


def all_reduce_(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """Reduces `tensor` over the ranks, in place."""
    rank, size = group.rank(), group.size()
    small = tensor.numel() * tensor.element_size() <= (_SMALL_BYTES_OF_PAIR if size == 2 else _SMALL_BYTES)
    ours = op in _SUMS or (op == dist.ReduceOp.MAX and small)
    if not ours or not tensor.is_contiguous() or not is_gloo(group, tensor.device):
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    flat = tensor.detach().view(-1)
    if small:
        copies = [flat if r == rank else torch.empty_like(flat) for r in range(size)]

        def finish() -> list[Any]:
            if op == dist.ReduceOp.MAX:
                flat.copy_(torch.stack(copies).amax(0))
            else:
                _sum_into(flat, copies, op)
            return []

        return _done_or_pending(_Pending(_exchange_parts(copies, rank, group), [finish], keep=copies), async_op)

    parts = list(flat.tensor_split(size))
    transfers, received = _collect_part(parts, rank, group)

    def reduce_own() -> list[Any]:
        _sum_into(parts[rank], received, op)
        return _exchange_parts(parts, rank, group)

    return _done_or_pending(_Pending(transfers, [reduce_own], keep=(tensor, received)), async_op)


def _collect_part(
    parts: list[torch.Tensor], rank: int, group: dist.ProcessGroup
) -> tuple[list[Any], list[torch.Tensor]]:
    """Sends part r to rank r; returns the transfers and every rank's version of this rank's part, in their order."""
    others = _others(rank, group.size())
    received = [part if r == rank else torch.empty_like(parts[rank]) for r, part in enumerate(parts)]
    transfers = [group.recv([received[r]], r, 0) for r in others]
    transfers += [group.send([parts[r]], r, 0) for r in others]
    return transfers, received


def _exchange_parts(parts: list[torch.Tensor], rank: int, group: dist.ProcessGroup) -> list[Any]:
    """Sends this rank's part to all and fills the others with theirs."""
    others = _others(rank, len(parts))
    transfers = [group.recv([parts[r]], r, 0) for r in others]
    return transfers + [group.send([parts[rank]], r, 0) for r in others]


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


def _others(rank: int, size: int) -> list[int]:
    """The other ranks, each rank beginning with its successor so that no one is everybody's first."""
    return [(rank + step) % size for step in range(1, size)]


def _done_or_pending(pending: _Pending, async_op: bool) -> dist.Work | None:
    if async_op:
        return pending
    pending.wait()
    return None


def _check_sum_or_average(op: Any) -> None:
    if op not in _SUMS:
        raise ValueError(f"reduce_scatter_into was given {op}; it sums (ReduceOp.SUM) or averages (ReduceOp.AVG)")
