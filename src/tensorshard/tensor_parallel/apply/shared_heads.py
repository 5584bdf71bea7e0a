"""Key and value layers with fewer heads than there are ranks (grouped-query and multi-query attention).

Megatron-LM gives each rank a copy of the head that it shares, and adds up the copies' gradients. Here no weight is held
twice. Every rank computes its shard of a head, as of any column layer, and the ranks that use one head gather its
features. In backward each gets the sum of the gradients of its shard. So optimizers, clipping, ZeRO and checkpoints
only see a column layer, and no two ranks compute the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from tensorshard.comm import primitives
from tensorshard.passes.compile import never_compiled


def check_shared_heads(name: str, heads: int, widths: Sequence[int], size: int) -> None:
    """Refuses `heads` key-value heads that `size` ranks cannot share evenly.

    Args:
        widths: output features of keys and of values, as far as the layer `name` has them.

    Raises:
        ValueError: they cannot be shared evenly.
    """
    if heads % size and size % heads:
        raise ValueError(
            f"{name} has {heads} key-value heads, which {size} ranks cannot share evenly: tp must be a multiple of "
            f"{heads}, or divide it"
        )
    for width in widths:
        if width % heads:
            raise ValueError(f"{name} has {width} key or value features, which are not {heads} equal heads")
        if heads < size and width % size:
            raise ValueError(
                f"{name} has {heads} key-value heads of {width // heads} features each, which the {size // heads} "
                f"ranks that share one cannot divide; lower tp"
            )


def share_heads(module: nn.Module, heads: int, parts: Sequence[int], group: dist.ProcessGroup) -> None:
    """Makes the column layer `module` return full heads.

    Args:
        heads: number of key (and value) heads. With as many as ranks, nothing is done.
        parts: output features of queries, keys and values, if the layer is fused.
    """
    if heads >= group.size():
        return
    together = group.size() // heads
    local = [part // group.size() for part in parts]
    # A hook, not a forward: column layers that are called together, or on parts of a sequence, have theirs replaced
    # elsewhere.
    module.register_forward_hook(partial(never_compiled(_gather_heads), local, together, group))


def _gather_heads(
    local: Sequence[int], together: int, group: dist.ProcessGroup, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    if not local:
        return _GatherHeads.apply(output, 1, together, group)
    queries, keys, values = local
    shared = output.narrow(-1, queries, keys + values)
    # One message for both: [*, keys or values, features].
    heads = _GatherHeads.apply(shared, 2, together, group)
    return torch.cat([output.narrow(-1, 0, queries), heads], -1)


class _GatherHeads(Function):
    """Gathers the features of a head from the ranks that share it. In backward, gradients are summed and cut.

    The ranks of a head are neighbours. They exchange over the group of all ranks, so no more communicators are needed.
    """

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, packed: int, together: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.packed, ctx.together, ctx.group = packed, together, group
        held = primitives.exchange_among(shard.expand(together, *shard.shape), together, group)
        return _join(held, packed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _SumHeads.apply(grads[0], ctx.packed, ctx.together, ctx.group), None, None, None


class _SumHeads(Function):
    """Sums what the ranks of a head have for this rank's shard of it. In backward, the sums are gathered."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, packed: int, together: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.packed, ctx.together, ctx.group = packed, together, group
        return primitives.exchange_among(_cut(heads, packed, together), together, group).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _GatherHeads.apply(grads[0], ctx.packed, ctx.together, ctx.group), None, None, None


def _join(held: torch.Tensor, packed: int) -> torch.Tensor:
    """[ranks, *, packed * shard] as [*, packed * ranks * shard]."""
    split = held.unflatten(-1, (packed, -1))
    return split.movedim(0, -2).flatten(-3)


def _cut(heads: torch.Tensor, packed: int, together: int) -> torch.Tensor:
    """Undoes :func:`_join`."""
    return heads.unflatten(-1, (packed, together, -1)).movedim(-2, 0).flatten(-2)
