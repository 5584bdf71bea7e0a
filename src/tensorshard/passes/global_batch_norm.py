"""The function ``batch_norm`` over the samples of all data ranks.

The formulas are those of Ioffe & Szegedy 2015; sums run over every rank's samples. Statistics are taken in two passes
(mean, then squared distance from it), because one pass cancels badly in fp32.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm.collectives import all_reduce_
from tensorshard.passes.compile import never_compiled


@never_compiled
def global_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float | torch.Tensor,
    eps: float,
    group: dist.ProcessGroup,
    counts: bool = True,
) -> torch.Tensor:
    """``F.batch_norm(..., training=True)``, where every rank of `group` has a part of the batch. A collective of
    `group`.

    Args:
        input: [samples, channels, ...]; ranks may have different numbers of samples.
        running_mean, running_var: [channels], updated in place; None if none are kept.
        weight, bias: [channels].
        momentum: the share of this batch in the running statistics; a tensor of one element, or a number.
        counts: whether `input` has a part in the statistics; else it is only normalized by them.
    """
    with torch.no_grad():
        mean, variance, count = _statistics(input if counts else input[:0], group)
        unbiased = variance * (count / (count - 1))
        for running, value in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                share = momentum.to(running.dtype) if isinstance(momentum, torch.Tensor) else momentum
                running.lerp_(value.to(running.dtype), share)
    weight = None if weight is None else _wide(weight)
    bias = None if bias is None else _wide(bias)
    return _Normalize.apply(input, weight, bias, mean, variance, count, eps, group, counts)


def _statistics(input: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel [C] and the number of values a channel has, over the group."""
    dims = _reduced(input)
    wide = _wide(input)
    sums = torch.cat([wide.sum(dims), wide.new_full((1,), input.numel() / input.size(1))])
    all_reduce_(sums, group, what="batch statistics")
    count = sums[-1]
    mean = sums[:-1] / count
    squares = (wide - _as_channels(mean, input)).square_().sum(dims)
    all_reduce_(squares, group, what="batch statistics")
    return mean, squares / count, count


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
        counts: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.eps, ctx.group, ctx.counts = eps, group, counts
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
        all_reduce_(sums, ctx.group, what="batch statistics")
        mean_grad, mean_product = (sums / count).chunk(2)
        scale = inverse_std if weight is None else inverse_std * weight
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if not ctx.counts:  # the statistics are constants for it
            mean_product, mean_grad = torch.zeros_like(mean_product), torch.zeros_like(mean_grad)
        grad_input = normalized.mul_(_as_channels(mean_product, input)).add_(_as_channels(mean_grad, input))
        grad_input = grad.sub(grad_input).mul_(_as_channels(scale, input)).to(input.dtype)
        grad_parameters = grad_weight if needs_weight else None, grad_bias if needs_bias else None
        return grad_input, *grad_parameters, None, None, None, None, None, None


def _reduced(input: torch.Tensor) -> list[int]:
    """All dimensions except 1, that of the channels."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as_channels(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (input.dim() - 2))
