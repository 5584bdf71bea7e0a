"""Batch normalization over the whole batch, as one device would compute it, when data ranks hold parts of it.

The formulas are those of Ioffe & Szegedy 2015; sums run over every rank's samples. Statistics are taken in two passes
(mean, then squared distance from it), because one pass cancels badly in fp32.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.torch_private.modules import BatchNormBase, NormBase, check_batch_norm_input


def synchronize_batch_norm(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes every batch normalization of `model` take its training statistics over `group`."""
    for module in model.modules():
        if isinstance(module, BatchNormBase):
            module.forward = partial(_forward, module, module.forward, group)  # type: ignore[method-assign]


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that a training forward of `model`'s batch and instance normalizations changes."""
    return [buffer for module in model.modules() if isinstance(module, NormBase) for buffer in module.buffers()]


def _forward(module: BatchNormBase, local_forward: Any, group: dist.ProcessGroup, input: torch.Tensor) -> torch.Tensor:
    if not module.training and module.track_running_stats:
        return local_forward(input)
    check_batch_norm_input(module, input)
    weight = None if module.weight is None else _wide(module.weight)
    bias = None if module.bias is None else _wide(module.bias)
    with torch.no_grad():
        mean, variance, count = _statistics(input, group)
        if module.training and module.track_running_stats:
            _update_running(module, mean, variance, count)
    return _Normalize.apply(input, weight, bias, mean, variance, count, module.eps, group)


def _statistics(input: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel [C] and the number of values a channel has, over the group."""
    dims = _reduced(input)
    wide = _wide(input)
    sums = torch.cat([wide.sum(dims), wide.new_full((1,), input.numel() / input.size(1))])
    all_reduce_(sums, group)
    count = sums[-1]
    mean = sums[:-1] / count
    squares = (wide - _as_channels(mean, input)).square_().sum(dims)
    all_reduce_(squares, group)
    return mean, squares / count, count


def _update_running(module: BatchNormBase, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None and module.running_var is not None
    module.num_batches_tracked.add_(1)
    if module.momentum is None:  # a plain average over all batches so far
        momentum = 1.0 / module.num_batches_tracked.double()
    else:
        momentum = torch.tensor(module.momentum, dtype=torch.float64, device=mean.device)
    unbiased = variance * (count / (count - 1))
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum.to(module.running_mean.dtype))
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum.to(module.running_var.dtype))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.eps, ctx.group = eps, group
        return F.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        input, weight, mean, variance, count = ctx.saved_tensors
        dims = _reduced(input)
        grad = _wide(grad_outputs[0])
        inverse_std = torch.rsqrt(variance + ctx.eps)
        normalized = (_wide(input) - _as_channels(mean, input)) * _as_channels(inverse_std, input)
        grad_bias = grad.sum(dims)
        grad_weight = (grad * normalized).sum(dims)
        sums = torch.cat([grad_bias, grad_weight])
        all_reduce_(sums, ctx.group)
        mean_grad, mean_product = (sums / count).chunk(2)
        scale = inverse_std if weight is None else inverse_std * weight
        grad_input = normalized.mul_(_as_channels(mean_product, input)).add_(_as_channels(mean_grad, input))
        grad_input = grad.sub(grad_input).mul_(_as_channels(scale, input)).to(input.dtype)
        if weight is None:
            return grad_input, None, None, None, None, None, None, None
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _reduced(input: torch.Tensor) -> list[int]:
    """Every dimension but the channels', which are dimension 1."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as_channels(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (input.dim() - 2))
