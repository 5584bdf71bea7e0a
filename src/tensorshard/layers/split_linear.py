"""``F.linear`` with a weight that is split over a group: column and row layers (Shoeybi et al. 2019, section 3).

Also here: how activations are laid out between split linear layers: in full on every rank, or as shards of the
sequence.

A column layer gathers its input and a row layer reduces its output; in backward each does what the other does in
forward (f and g of Shoeybi et al. 2019, section 3; with the sequence split, Korthikanti et al. 2022, section 4.2.2).
The same bytes travel either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from tensorshard.comm import differentiable as collectives
from tensorshard.comm import primitives
from tensorshard.comm.collectives import advance
from tensorshard.comm.differentiable import scatter
from tensorshard.comm.groups import Group
from tensorshard.comm.marks import ParallelMark, get_mark, set_mark
from tensorshard.comm.primitives import Started
from tensorshard.comm.sharding import normalize_dim, shard_range, shard_sizes, to_local
from tensorshard.layers.arguments import as_rows, autocast, check_dim, full_size, parameter_group
from tensorshard.model.kept_results import function_has_saved, kept_result
from tensorshard.torch_private.dispatch import has_dispatch_mode
from tensorshard.torch_private.tensors import reshaped_product


@dataclass(frozen=True)
class Replicated:
    """Every rank has all of an activation: nothing is gathered, and a reduction is an all-reduce."""

    group: dist.ProcessGroup

    def full_shape(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of what :meth:`gather` returns for `tensor`."""
        return tensor.shape

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself, which is full."""
        return tensor

    def start_gather(self, tensor: torch.Tensor) -> Started:
        """`tensor` itself, in the form of a collective under way."""
        return Started(None, lambda: tensor)

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; `tensor` is overwritten unless a mode may have kept it, as the user's own selective
        recomputation does."""
        if has_dispatch_mode():
            tensor = tensor.clone()
        primitives.all_reduce(tensor, self.group)
        return tensor

    def start_reduce(self, tensor: torch.Tensor) -> Started:
        """Begins to sum `tensor` over the ranks, in place."""
        return Started(primitives.all_reduce(tensor, self.group, async_op=True), lambda: tensor)

    def differentiable_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`gather`, for computations that differ by rank; in a graph for another backward."""
        return collectives.copy(tensor, self.group)

    def differentiable_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`reduce`, in a graph for another backward."""
        return collectives.reduce(tensor, self.group)


@dataclass(frozen=True)
class SequenceSharded:
    """Every rank has its shard of the positions: a gather is an all-gather, and a reduction a reduce-scatter.

    Args:
        dim: the dimension of the positions.
        sizes: how many of them each rank has.
    """

    dim: int
    sizes: Sequence[int]
    group: dist.ProcessGroup

    @classmethod
    def of_length(cls, dim: int, length: int, group: dist.ProcessGroup) -> "SequenceSharded":
        """The shards of a sequence of `length` positions."""
        return cls(dim, shard_sizes(length, group.size()), group)

    def full_shape(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of what :meth:`gather` returns for `tensor`."""
        shape = list(tensor.shape)
        shape[self.dim] = sum(self.sizes)
        return torch.Size(shape)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All positions."""
        return primitives.gather_dim(tensor, self.dim, self.sizes, self.group)

    def start_gather(self, tensor: torch.Tensor) -> Started:
        """Begins to gather all positions."""
        return primitives.start_gather_dim(tensor, self.dim, self.sizes, self.group)

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's positions of the sum over the ranks."""
        return primitives.reduce_scatter_dim(tensor, self.dim, self.sizes, self.group)

    def start_reduce(self, tensor: torch.Tensor) -> Started:
        """Begins to sum over the ranks. This rank gets its own positions of the sum."""
        return primitives.start_reduce_scatter_dim(tensor, self.dim, self.sizes, self.group)

    def differentiable_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`gather`, for computations that differ by rank; in a graph for another backward."""
        return collectives.gather_for_sum(tensor, self.dim, self.group, size=sum(self.sizes))

    def differentiable_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`reduce`, in a graph for another backward."""
        return set_mark(collectives.reduce_scatter(tensor, self.dim, self.group), None)


ActivationSharding = Replicated | SequenceSharded


def parallel_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dim: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """``F.linear`` with a weight that is split over a group.

    Args:
        input: [*, in_features], full; with ``dim=0`` it may also be this rank's shard of the input features.
        weight: this rank's shard of [out_features, in_features], or a DTensor.
        bias: [out_features]: split as the weight's rows with ``dim=1``, full with ``dim=0``.
        dim: None: ``F.linear``. 1 or -1: the output features are split (a column layer). 0: the input features are
            split (a row layer).
        group: the ranks that hold the shards; by default the weight's own, else the model-parallel group.

    Returns:
        [*, out_features]. With ``dim=1`` this rank's shard of the last dimension, marked as a shard.

    Raises:
        ValueError: `dim` is none of these; a shard was given where a full input is needed, or the reverse;
            `group` is not the weight's.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> weight = torch.randn(32, 16)  # this rank's half of [64, 16]
        >>> ts.nn.functional.parallel_linear(torch.randn(8, 16), weight, dim=1).shape
        torch.Size([8, 32])
    """
    check_dim(dim, "parallel_linear")
    if dim is None:
        _check_whole(input, "parallel_linear with dim=None")
        return F.linear(input, weight, bias)
    size = full_size(weight, 1 if dim == 0 else 0)
    return split_linear(input, weight, bias, dim, parameter_group(weight, group, "weight"), size)


def split_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    group: dist.ProcessGroup,
    size: int | None,
) -> torch.Tensor:
    """As :func:`parallel_linear`, for a caller that knows how its weight is split. Marks on the weight are not read.

    Args:
        dim: 0, 1 or -1.
        size: of the dimension that is split: input features with ``dim=0``, else output features; None if not known.
    """
    local_weight, local_bias = to_local(weight), None if bias is None else to_local(bias)
    if dim == 0:
        input = _as_row_input(input, local_weight.size(1), size, group)
        return row_linear(input, local_weight, local_bias, Replicated(group))
    _check_whole(input, "a layer that splits its output features")
    if input.size(-1) != local_weight.size(1):
        raise ValueError(
            f"an input of shape {list(input.shape)} was given to a layer of {local_weight.size(1)} input "
            "features: a layer that splits its output features needs its full input"
        )
    (output,) = column_linear(input, [(local_weight, local_bias)], Replicated(group))
    return set_mark(output, ParallelMark(-1, size, group))


def _check_whole(input: torch.Tensor, what: str) -> None:
    mark = get_mark(input)
    if mark is not None and _is_of_features(mark, input) and _is_split(mark):
        raise ValueError(
            f"a tensor {list(input.shape)} marked as split along its last dimension was given to {what}, "
            "which needs the full input: put it together with tensorshard.distributed.gather(x, dim=-1), or use "
            "a layer with dim=0"
        )


def _is_of_features(mark: ParallelMark, input: torch.Tensor) -> bool:
    return mark.dim is not None and normalize_dim(mark.dim, input.ndim) == input.ndim - 1


def _is_split(mark: ParallelMark) -> bool:
    return mark.group is None or mark.group.size() > 1


def _as_row_input(input: torch.Tensor, part: int, full: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's shard of the input of a row layer: `part` of its `full` input features."""
    mark = get_mark(input)
    width = input.size(-1)
    is_shard = mark is not None and _is_of_features(mark, input)
    if is_shard and width == part:
        return input
    if not is_shard:
        expected = shard_range(width, group.size(), group.rank())[1]
        if width == full or (full is None and width != part and expected == part):
            return scatter(input, -1, group)
        if width == part:  # it has no mark, but the size of this rank's shard
            return input
    needed = f"its shard of {part}" if full is None else f"all {full} input features, or its shard of {part}"
    raise ValueError(
        "an input of shape "
        f"{list(input.shape)}{' marked as split along its last dimension' if is_shard else ''} was given to "
        f"rank {group.rank()} of {group.size()} of a layer that splits its input features: it needs {needed}"
    )


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


def _has_whole_positions(input: Any, *others: Any) -> bool:
    """Whether a layer acts on each position of a sequence alone, which context parallelism cuts."""
    is_cut = any(isinstance(other, SequenceSharded) for other in others)
    return not is_cut and input.split_dim != input.ndim - 1


class _ColumnLinear(Function):
    """Computes this rank's columns of several outputs, from one input and this rank's rows of several weights.

    However many weights there are, backward sums the input's gradient over the ranks once, while it computes the
    weights' gradients. An input that was gathered is not kept: backward gathers it again during a matrix product.
    """

    acts_on_parts = staticmethod(_has_whole_positions)
    joins_positions = True

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
    product = torch.addmm(bias, as_rows(input), weight.t())
    return reshaped_product(product, (*input.shape[:-1], weight.size(0)))


def _sum_of_products(lefts: list[torch.Tensor | None], rights: list[torch.Tensor]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for left, right in zip(lefts, rights, strict=True):
        if left is not None:
            total = left.mm(right) if total is None else total.addmm_(left, right)
    return total


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
    output: torch.Tensor = _RowLinear.apply(given, weight, bias, sharding)
    function_has_saved()
    return output


class _RowLinear(Function):
    """Multiplies this rank's columns of the input and of the weight, and sums the products over the ranks."""

    acts_on_parts = staticmethod(_has_whole_positions)
    joins_positions = False

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

        def output() -> torch.Tensor:
            total = sharding.reduce(F.linear(input, weight))
            return total if bias is None else total.add_(bias)

        return kept_result(output)

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
