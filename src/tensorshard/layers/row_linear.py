"""A linear layer of which each rank has some input features: a row layer (Shoeybi et al. 2019, section 3)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from tensorshard.layers.activation_sharding import ActivationSharding
from tensorshard.layers.arguments import as_rows, autocast


class _RowLinear(Function):
    """Multiplies this rank's columns of the input and of the weight, and sums the products over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sharding: ActivationSharding,
    ) -> torch.Tensor:
        ctx.sharding = sharding
        ctx.save_for_backward(input, weight)
        output = sharding.reduce(F.linear(input, weight))
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            grad_bias = as_rows(grad).sum(0) if ctx.needs_input_grad[2] else None
            full = ctx.sharding.differentiable_gather(grad)
        else:
            gathering = ctx.sharding.start_gather(grad)
            grad_bias = as_rows(grad).sum(0) if ctx.needs_input_grad[2] else None
            full = gathering.wait()
        grad_input = full.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = as_rows(full).t().mm(as_rows(input)) if ctx.needs_input_grad[1] else None
        return grad_input, grad_weight, grad_bias, None


def row_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sharding: ActivationSharding
) -> torch.Tensor:
    """The output of a row layer.

    Args:
        input: [*, this rank's part of in_features], with all positions.
        weight: [out_features, this rank's part of in_features].
        bias: [out_features]. Its gradient counts those positions of the output that this rank has.
        sharding: how the output is to be laid out over the ranks.

    Returns:
        [*, out_features], laid out as `sharding` says.
    """
    given, weight, bias = autocast(input, weight, bias)  # type: ignore[assignment]
    return _RowLinear.apply(given, weight, bias, sharding)
