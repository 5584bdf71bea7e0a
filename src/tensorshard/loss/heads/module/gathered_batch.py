"""Joins the batches of several ranks to one."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from tensorshard.comm.differentiable import gather, gather_for_sum


class _ScaleGrad(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None


def gather_features(tensor: torch.Tensor, group: dist.ProcessGroup, grad_scale: float, sums: bool) -> torch.Tensor:
    """The ranks' tensors, concatenated along their first dimension.

    Args:
        grad_scale: multiplies the gradient of `tensor`.
        sums: whether each rank's gradient of the result is only a part of the sum. Then backward is a reduce-scatter.
            Else each rank has the full gradient, and takes that of its own samples.
    """
    if grad_scale != 1.0:
        tensor = _ScaleGrad.apply(tensor, grad_scale)
    return gather_for_sum(tensor, 0, group) if sums else gather(tensor, 0, group)


def same_ranks(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether two groups are of the same processes, in the same order."""
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
