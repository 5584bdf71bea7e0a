"""Linear layers whose weight is split over a group (Shoeybi et al. 2019, section 3)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from tensorshard.comm import primitives
from tensorshard.comm.collectives import advance
from tensorshard.comm.differentiable import scatter
from tensorshard.comm.groups import Group
from tensorshard.comm.marks import ParallelMark, get_mark, set_mark
from tensorshard.comm.sharding import normalize_dim, shard_range, to_local
from tensorshard.layers.arguments import as_rows, autocast, check_dim, parameter_group
from tensorshard.torch_private.dispatch import has_dispatch_mode


class _ColumnLinear(Function):
    """A whole input, this rank's rows of the weight (output features): this rank's columns of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.group = group
        if group.size() > 1:
            ctx.split_features = weight.size(0)  # by which a loss recognises a shard that lost its mark
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = reduction = None
        if ctx.needs_input_grad[0]:
            grad_input = grad.matmul(weight)
            # The sum over ranks travels while the weight's gradient is computed.
            reduction = primitives.all_reduce(grad_input, ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(grad, input)
        advance(reduction)
        if ctx.needs_input_grad[2]:
            grad_bias = as_rows(grad).sum(0)
        if reduction is not None:
            reduction.wait()
        return grad_input, grad_weight, grad_bias, None


class _RowLinear(Function):
    """This rank's columns of the input and of the weight (input features): the whole output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        output = F.linear(input, weight)
        if has_dispatch_mode():
            output = output.clone()  # selective recomputation keeps the product, and what follows writes into it
        primitives.all_reduce(output, group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        grad_input = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, input) if ctx.needs_input_grad[1] else None
        grad_bias = as_rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None


def parallel_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dim: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """``F.linear`` with a weight that is split over a group.

    Args:
        input: [*, in_features], whole; with ``dim=0`` it may also be this rank's part of the input features.
        weight: [out_features, in_features], as a DTensor, or this rank's part of it.
        bias: [out_features]: split as the weight's rows with ``dim=1``, whole with ``dim=0``.
        dim: None: ``F.linear``. 1 or -1: the output features are split (a column layer); the output is this
            rank's part, [*, part of out_features], and marked as such. 0: the input features are split (a row
            layer); the output is whole.
        group: the ranks that hold the parts; by default the weight's own, else the model-parallel group.

    Raises:
        ValueError: `dim` is none of these; a part was given where a whole input is needed, or the reverse;
            `group` is not the weight's.
    """
    check_dim(dim, "parallel_linear")
    if dim is None:
        _check_whole(input, "parallel_linear with dim=None")
        return F.linear(input, weight, bias)
    process_group = parameter_group(weight, group, "weight")
    local_weight, local_bias = to_local(weight), None if bias is None else to_local(bias)
    if dim == 0:
        whole_size = weight.size(1) if isinstance(weight, DTensor) else None
        input = _as_row_input(input, local_weight.size(1), whole_size, process_group)
        input, local_weight, local_bias = autocast(input, local_weight, local_bias)  # type: ignore[assignment]
        return _RowLinear.apply(input, local_weight, local_bias, process_group)
    _check_whole(input, "a layer that splits its output features")
    if input.size(-1) != local_weight.size(1):
        raise ValueError(
            f"an input of shape {list(input.shape)} was given to a layer of {local_weight.size(1)} input "
            "features: a layer that splits its output features needs its input whole"
        )
    input, local_weight, local_bias = autocast(input, local_weight, local_bias)  # type: ignore[assignment]
    output = _ColumnLinear.apply(input, local_weight, local_bias, process_group)
    return set_mark(output, ParallelMark(-1, weight.size(0) if isinstance(weight, DTensor) else None, process_group))


def _weight_gradient(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return as_rows(grad).t().mm(as_rows(input))


def _check_whole(input: torch.Tensor, what: str) -> None:
    mark = get_mark(input)
    if mark is not None and normalize_dim(mark.dim, input.ndim) == input.ndim - 1 and _is_split(mark):
        raise ValueError(
            f"a tensor {list(input.shape)} marked as split along its last dimension was given to {what}, "
            "which needs it whole: put it together with tensorshard.distributed.gather(x, dim=-1), or use "
            "a layer with dim=0"
        )


def _is_split(mark: ParallelMark) -> bool:
    return mark.group is None or mark.group.size() > 1


def _as_row_input(input: torch.Tensor, part: int, whole: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the input of a row layer, which has `part` of `whole` input features here."""
    mark = get_mark(input)
    width = input.size(-1)
    is_part = mark is not None and normalize_dim(mark.dim, input.ndim) == input.ndim - 1
    if is_part and width == part:
        return input
    if not is_part:
        expected = shard_range(width, group.size(), group.rank())[1]
        if width == whole or (whole is None and width != part and expected == part):
            return scatter(input, -1, group)
        if width == part:  # nobody marked it, but this is what this rank is to have
            return input
    needed = f"its part of {part}" if whole is None else f"all {whole} input features, or its part of {part}"
    raise ValueError(
        "an input of shape "
        f"{list(input.shape)}{' marked as split along its last dimension' if is_part else ''} was given to "
        f"rank {group.rank()} of {group.size()} of a layer that splits its input features: it needs {needed}"
    )
