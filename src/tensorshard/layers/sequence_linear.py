"""Split linear layers between which a sequence is split too (Korthikanti et al. 2022, section 4.2.2).

A column layer gathers the sequence and a row layer scatters its sum, in place of the identity and the all-reduce that
stand there without: the same bytes travel. Backward gathers a column layer's input again, so that no rank keeps a whole
sequence for it, and both of its collectives run beside a matrix product.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tensorshard.comm import primitives
from tensorshard.comm.sharding import shard_sizes
from tensorshard.layers.arguments import as_rows, autocast


class _GatheredColumns(Function):
    """This rank's part of a sequence, its rows of several weights: its columns of the outputs, for all positions."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        ctx.save_for_backward(input, *weights)
        ctx.set_materialize_grads(False)  # a layer whose output goes unused costs nothing
        whole = primitives.gather_dim(input, dim, sizes, group)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        input, *weights = ctx.saved_tensors
        present = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        gathering = None
        if any(ctx.needs_input_grad[4:]):
            gathering = primitives.start_gather_dim(input, ctx.dim, ctx.sizes, ctx.group)
        grad_input = scattering = None
        if ctx.needs_input_grad[0]:
            flat: torch.Tensor | None = None
            for grad, weight in present:
                flat = as_rows(grad).mm(weight) if flat is None else flat.addmm_(as_rows(grad), weight)
            shape = list(input.shape)
            shape[ctx.dim] = sum(ctx.sizes)
            whole_grad = input.new_zeros(shape) if flat is None else flat.view(shape)
            scattering = primitives.start_reduce_scatter_dim(whole_grad, ctx.dim, ctx.sizes, ctx.group)
        rows = None if gathering is None else as_rows(gathering.wait())
        grad_parameters: list[torch.Tensor | None] = []
        for index, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * index : 6 + 2 * index]
            of_output = None if grad is None else as_rows(grad)
            wanted = of_output is not None and needs_weight and rows is not None
            grad_parameters.append(of_output.t().mm(rows) if wanted else None)  # type: ignore[union-attr, arg-type]
            grad_parameters.append(None if of_output is None or not needs_bias else of_output.sum(0))
        if scattering is not None:
            grad_input = scattering.wait()
        return grad_input, None, None, None, *grad_parameters


class _ScatteredRow(Function):
    """This rank's columns of the input and of the weight: its part of the sequence of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dim: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        sizes = shard_sizes(input.size(dim), group.size())
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        ctx.save_for_backward(input, weight)
        output = primitives.reduce_scatter_dim(F.linear(input, weight), dim, sizes, group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        gathering = primitives.start_gather_dim(grad, ctx.dim, ctx.sizes, ctx.group)
        grad_bias = as_rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        whole = gathering.wait()
        grad_input = whole.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = as_rows(whole).t().mm(as_rows(input)) if ctx.needs_input_grad[1] else None
        return grad_input, grad_weight, grad_bias, None, None


def gathered_columns(
    input: torch.Tensor,
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    dim: int,
    length: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """The outputs of column layers that read one tensor, of which each rank has its part of the sequence.

    Args:
        input: [*, in_features], of which `dim` has this rank's part of `length` positions.
        parameters: weight [this rank's part of out_features, in_features] and bias of each layer.

    Returns:
        For each layer [*, this rank's part of out_features], with all positions.
    """
    given, *flat = autocast(input, *(tensor for pair in parameters for tensor in pair))
    return _GatheredColumns.apply(given, dim, shard_sizes(length, group.size()), group, *flat)


def scattered_row(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """The output of a row layer, of which each rank keeps its part of the sequence.

    Args:
        input: [*, this rank's part of in_features], with all positions.
        weight: [out_features, this rank's part of in_features]. bias: [out_features]; its gradient is partial.
    """
    given, weight, bias = autocast(input, weight, bias)  # type: ignore[assignment]
    return _ScatteredRow.apply(given, weight, bias, dim, group)
