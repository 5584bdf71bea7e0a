"""What layers written by hand exchange between all ranks, with their gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_part(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of `tensor`, which is cut into as many equal parts of dimension `dim` as there are ranks."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def whole(part: Tensor, dim: int) -> Tensor:
    """All ranks' parts, joined along dimension `dim`. No gradient flows through it."""
    part = part.detach().contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim)


def total(tensor: Tensor) -> Tensor:
    """The sum over the ranks. No gradient flows through it."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor)
    return tensor


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return total(gradient)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return total(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return whole(part, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_part(total(gradient), ctx.dim), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return own_part(total(tensor), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return whole(gradient, ctx.dim), None


def copy_to_ranks(tensor: Tensor) -> Tensor:
    """`tensor`, which is the same on all ranks and of which each rank computes a part: gradients are summed."""
    return _Copy.apply(tensor)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over the ranks, with which all go on computing the same."""
    return _Sum.apply(tensor)


def gather_parts(part: Tensor, dim: int) -> Tensor:
    """All ranks' parts, joined along `dim`, of which each rank computes another part: gradients are summed."""
    return _Gather.apply(part, dim)


def sum_and_scatter(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    return _Scatter.apply(tensor, dim)
