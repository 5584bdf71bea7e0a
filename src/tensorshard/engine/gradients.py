"""The norm of a whole model's gradient, however it is laid out, and scaling it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.sharding import to_local
from tensorshard.torch_private.operators import foreach_mul_, foreach_norm


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of the gradients that this rank holds; parameters without one are left out."""
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def global_norm(
    parameters: Iterable[torch.Tensor],
    num_shards: Mapping[torch.Tensor, float],
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    always_sum: bool = False,
    dtype: torch.dtype | None = None,
    known: Callable[[Any], torch.Tensor | None] | None = None,
    spoil: torch.Tensor | None = None,
) -> torch.Tensor:
    """L2 norm over the gradients of all `parameters`, on every rank the same: a scalar in fp64.

    Each tensor counts once however many ranks hold a copy: a rank's share of the sum of squares is divided by the
    number of copies, and one sum over `group`, the world, does the rest.

    Args:
        num_shards: over how many ranks each parameter's elements are split; the other ranks hold copies.
        device: on which the sum is sent.
        always_sum: whether every rank takes part in the sum, even if it could compute the norm alone. This is needed
            where ranks have different parameters, as in a pipeline.
        dtype: of the sum of squares; that of the gradients by default.
        known: this rank's norm of a parameter's gradient if it is known already, else None.
        spoil: if it is above 0 on some rank, the norm is NaN on all, with `always_sum`.
    """
    world_size = group.size()
    with_gradient = [p for p in parameters if p.grad is not None]
    if not with_gradient:
        total = _spoiled(torch.zeros((), dtype=torch.float64, device=device), spoil)
        if always_sum:
            all_reduce_(total, group, what="the norm of the gradient")
        return total.sqrt()
    norms = _local_norms(with_gradient, dtype, known)
    if device is not None:  # offloaded gradients may be on another device
        norms = [norm.to(device) for norm in norms]
    alike = len({n.dtype for n in norms}) == 1
    squares = (torch.stack(list(norms)).double() if alike else torch.stack([n.double() for n in norms])).square()
    shards = [num_shards[p] for p in with_gradient]
    if len(set(shards)) == 1:
        total = squares.sum() * (shards[0] / world_size)
    else:
        total = (squares * torch.tensor(shards, dtype=torch.float64, device=squares.device)).sum() / world_size
    total = _spoiled(total, spoil)
    if always_sum or any(count > 1 for count in shards):
        all_reduce_(total, group, what="the norm of the gradient")
    else:
        total = total * world_size  # every rank holds everything
    return total.sqrt()


def _spoiled(total: torch.Tensor, spoil: torch.Tensor | None) -> torch.Tensor:
    """`total`, or NaN where `spoil` is above 0. Nothing is read from a GPU."""
    return total if spoil is None else total.masked_fill(spoil.to(total.device) > 0, torch.nan)


def _local_norms(
    parameters: list[torch.Tensor], dtype: torch.dtype | None, known: Callable[[Any], torch.Tensor | None] | None
) -> list[torch.Tensor]:
    if known is None or dtype is not None:
        return list(foreach_norm(local_gradients(parameters), 2.0, dtype))
    norms = {p: norm for p in parameters if (norm := known(p)) is not None}
    for p in parameters:
        if p not in norms:
            [norms[p]] = foreach_norm(local_gradients([p]), 2.0, dtype)
    return [norms[p] for p in parameters]


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """The factor that makes the gradients' norm at most `largest` (Pascanu et al. 2013)."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    gradients = local_gradients(parameters)
    if not gradients:
        return
    if isinstance(factor, torch.Tensor):
        for device, dtype in {(g.device, g.dtype) for g in gradients}:
            foreach_mul_([g for g in gradients if (g.device, g.dtype) == (device, dtype)], factor.to(device, dtype))
    else:
        foreach_mul_(gradients, factor)
