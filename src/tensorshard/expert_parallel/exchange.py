"""Rows of tensors that travel between ranks: any number from any rank to any other one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from tensorshard.comm.primitives import start_exchange
from tensorshard.comm.sharding import shard_sizes
from tensorshard.comm.world import world
from tensorshard.common.never_compiled import never_compiled


def exchange_counts(counts: torch.Tensor, rows: int, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to each rank, and how many it gets. One read from the device.

    Args:
        counts: [ranks], the first of these, on the device.
        rows: their sum. In an estimate, each rank gets as many as any other.
    """
    received = torch.cat(start_exchange([[count] for count in counts.split(1)], [1] * group.size(), counts, group)())
    equal = shard_sizes(rows, group.size())
    sent, got = world().known(torch.stack([counts, received]), [equal, equal])
    return sent, got


@never_compiled  # compiled code takes no views of bytes of several tensors
def exchange_rows(
    tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The rows that all ranks send to this one, in the order of the ranks. Differentiable: gradients travel back.

    Args:
        tensors: each [sum(sent), *], the rows for rank 0 first. They travel as one message.
        sent: how many go to each rank.
        received: how many each rank sends here.
    """
    return list(_Exchange.apply(tuple(sent), tuple(received), group, *tensors))


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        widths = [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors]  # bytes of a row
        by_rank = [
            tensor.reshape(-1).view(torch.uint8).split([count * width for count in sent])
            for tensor, width in zip(tensors, widths, strict=True)
        ]
        outgoing = list(zip(*by_rank, strict=True))
        parts = start_exchange(outgoing, [count * sum(widths) for count in received], outgoing[0][0], group)()
        split = [part.split([n * width for width in widths]) for part, n in zip(parts, received, strict=True)]
        results = tuple(
            torch.cat(pieces).view(tensor.dtype).view(sum(received), *tensor.shape[1:])
            for tensor, pieces in zip(tensors, zip(*split, strict=True), strict=True)
        )
        ctx.reverse = received, sent, group
        ctx.is_number = [result.is_floating_point() or result.is_complex() for result in results]
        ctx.mark_non_differentiable(*(r for r, is_number in zip(results, ctx.is_number, strict=True) if not is_number))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        numbers = [grad for grad, is_number in zip(grads, ctx.is_number, strict=True) if is_number]
        back = iter(_Exchange.apply(*ctx.reverse, *numbers))
        return None, None, None, *(next(back) if is_number else None for is_number in ctx.is_number)
