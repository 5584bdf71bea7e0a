"""Rows of a tensor that travel between ranks: any number from any rank to any other one."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from tensorshard.comm.primitives import start_exchange
from tensorshard.comm.sharding import shard_sizes
from tensorshard.comm.world import world


def exchange_counts(counts: torch.Tensor, rows: int, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to each rank, and how many it gets. One read from the device.

    Args:
        counts: [ranks], the first of these, on the device.
        rows: their sum. In an estimate, each rank gets as many as any other.
    """
    received = torch.cat(start_exchange(list(counts.split(1)), [1] * group.size(), counts, group)())
    equal = shard_sizes(rows, group.size())
    sent, got = world().known(torch.stack([counts, received]), [equal, equal])
    return sent, got


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """The rows that all ranks send to this one, in the order of the ranks. Differentiable: gradients travel back.

    Args:
        rows: [sum(sent), *], those for rank 0 first.
        sent: how many go to each rank.
        received: how many each rank sends here.
    """
    return _Exchange.apply(rows, tuple(sent), tuple(received), group)  # type: ignore[no-any-return]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.reverse = received, sent, group
        width = rows[:1].numel() if len(rows) else rows.new_empty((1, *rows.shape[1:])).numel()
        outgoing = rows.reshape(-1).split([count * width for count in sent])
        parts = start_exchange(outgoing, [count * width for count in received], rows, group)()
        return torch.cat(parts).view(-1, *rows.shape[1:]) if width else rows.new_empty((sum(received), *rows.shape[1:]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Exchange.apply(grads[0], *ctx.reverse), None, None, None
