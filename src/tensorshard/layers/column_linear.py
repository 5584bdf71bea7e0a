"""Linear layers of which each rank computes some output features: column layers (Shoeybi et al. 2019, section 3)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from tensorshard.comm.collectives import advance
from tensorshard.layers.activation_sharding import ActivationSharding
from tensorshard.layers.arguments import as_rows, autocast


class _ColumnLinear(Function):
    """Computes this rank's columns of several outputs, from one input and this rank's rows of several weights.

    However many weights there are, backward sums the input's gradient over the ranks once, while it computes the
    weights' gradients. An input that was gathered is not kept: backward gathers it again during a matrix product.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, sharding: ActivationSharding, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights: Any = parameters[::2]
        ctx.sharding = sharding
        if sharding.group.size() > 1:
            # With these sizes, a loss recognises a shard that has lost its mark.
            ctx.split_features = [weight.size(0) for weight in weights]
        ctx.save_for_backward(input, *weights)
        ctx.set_materialize_grads(False)  # a layer whose output goes unused costs nothing
        full = sharding.gather(input)
        return tuple(_linear(full, weight, bias) for weight, bias in zip(weights, parameters[1::2], strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _twice_differentiable(ctx, grads)
        input, *weights = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[2::2], ctx.needs_input_grad[3::2]
        of_outputs = [None if grad is None else as_rows(grad) for grad in grads]
        gathering = ctx.sharding.start_gather(input) if any(needs_weight) else None
        reduction = None
        if ctx.needs_input_grad[0]:
            shape = ctx.sharding.full_shape(input)
            of_input = _sum_of_products(of_outputs, weights)
            of_input = input.new_zeros(shape) if of_input is None else of_input.view(shape)
            # The sum over the ranks travels while the weights' gradients are computed.
            reduction = ctx.sharding.start_reduce(of_input)
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if gathering is not None:
            rows = as_rows(gathering.wait())
            of_weights = [
                rows_of.t().mm(rows) if needed and rows_of is not None else None
                for rows_of, needed in zip(of_outputs, needs_weight, strict=True)
            ]
        if reduction is not None:
            advance(reduction.work)
        of_biases = [
            rows_of.sum(0) if needed and rows_of is not None else None
            for rows_of, needed in zip(of_outputs, needs_bias, strict=True)
        ]
        of_parameters = [grad for pair in zip(of_weights, of_biases, strict=True) for grad in pair]
        return None if reduction is None else reduction.wait(), None, *of_parameters


def _twice_differentiable(ctx: Any, grads: Any) -> Any:
    """What the backward of :class:`_ColumnLinear` returns, in a graph for another backward."""
    input, *weights = ctx.saved_tensors
    of_outputs = [None if grad is None else as_rows(grad) for grad in grads]
    of_input = None
    if ctx.needs_input_grad[0]:
        shape = ctx.sharding.full_shape(input)
        products = [rows.mm(weight) for rows, weight in zip(of_outputs, weights, strict=True) if rows is not None]
        total = torch.stack(products).sum(0).view(shape) if products else input.new_zeros(shape)
        of_input = ctx.sharding.differentiable_reduce(total)
    needs_weight, needs_bias = ctx.needs_input_grad[2::2], ctx.needs_input_grad[3::2]
    full = as_rows(ctx.sharding.differentiable_gather(input)) if any(needs_weight) else None
    of_parameters = []
    for rows, of_weight, of_bias in zip(of_outputs, needs_weight, needs_bias, strict=True):
        of_parameters.append(rows.t().mm(full) if of_weight and rows is not None and full is not None else None)
        of_parameters.append(rows.sum(0) if of_bias and rows is not None else None)
    return of_input, None, *of_parameters


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` whose output is not a view: autograd forbids in-place operations, such as ``nn.ReLU(inplace=True)``,
    on a view that a custom function returns."""
    if bias is None or input.ndim < 3:
        return F.linear(input, weight, bias)
    output = input.new_empty(*input.shape[:-1], weight.size(0))
    torch.addmm(bias, as_rows(input), weight.t(), out=as_rows(output))
    return output


def _sum_of_products(lefts: list[torch.Tensor | None], rights: list[torch.Tensor]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for left, right in zip(lefts, rights, strict=True):
        if left is not None:
            total = left.mm(right) if total is None else total.addmm_(left, right)
    return total


def column_linear(
    input: torch.Tensor,
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    sharding: ActivationSharding | None,
) -> tuple[torch.Tensor, ...]:
    """The outputs of column layers that read one input.

    Args:
        input: [*, in_features], laid out as `sharding` says.
        parameters: of each layer its weight [this rank's part of out_features, in_features] and its bias.
        sharding: how the input is laid out over the ranks; None if the caller has gathered it and sums its gradient.

    Returns:
        For each layer [*, this rank's part of out_features], with all positions.
    """
    if sharding is None:
        return tuple(F.linear(input, weight, bias) for weight, bias in parameters)
    given, *flat = autocast(input, *(tensor for pair in parameters for tensor in pair))
    return _ColumnLinear.apply(given, sharding, *flat)
