"""Differentiable collectives over a model-parallel group.

Each has the backward of Megatron-LM (Shoeybi et al. 2019, section 3): a tensor that is the same on every rank
has a gradient that is the same on every rank.

=================  ==========================  ==========================
function           forward                     backward
=================  ==========================  ==========================
`copy`             identity                    all-reduce (sum)
`reduce`           all-reduce (sum)            identity
`scatter`          this rank's slice           all-gather
`gather`           all-gather                  this rank's slice
`gather_for_sum`   all-gather                  sum, this rank's slice
`reduce_scatter`   sum, this rank's slice      all-gather
`all_to_all`       split, exchange, join       the reverse exchange
=================  ==========================  ==========================

Dimensions are cut as :mod:`tensorshard.comm.sharding` says, evenly or not. ``group`` is a process
group or a one-dimensional mesh; by default the model-parallel group of
:func:`tensorshard.distributed.init_process_group`.

Also here: whether torch's ``DistributedDataParallel`` will average a gradient that ranks of a group are to add up.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from tensorshard.comm import primitives
from tensorshard.comm.decisions import held_sizes
from tensorshard.comm.groups import Group, resolve_group
from tensorshard.comm.kept_results import as_kept
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharded_tensors import check_tensor, is_split, local_of, refuse_dtensor
from tensorshard.comm.sharding import normalize_dim, shard_sizes
from tensorshard.torch_private.autograd import are_saved_tensors_hooked, is_in_backward
from tensorshard.torch_private.process_groups import active_ddp_module


def _along_another_dimension(tensor: Any, dim: int, *_: Any) -> bool:
    """Whether a sequence that context parallelism cuts is cut along another dimension than `dim`.

    Where it is not, `joins_positions` of the function says whether it joins parts or cuts one.
    """
    return bool(tensor.split_dim != dim % tensor.ndim)


class _Copy(Function):
    acts_on_parts = True  # of sequences that context parallelism cuts

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Reduce.apply(grads[0], ctx.group), None


class _Reduce(Function):
    acts_on_parts = True

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        primitives.all_reduce(total, group)
        return as_kept(total, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Copy.apply(grads[0], ctx.group), None


class _Scatter(Function):
    acts_on_parts = staticmethod(_along_another_dimension)
    joins_positions = False

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        dim: int,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
        grad_scale: float,
    ) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.group, ctx.grad_scale = dim, sizes, group, grad_scale
        return primitives.slice_dim(tensor, dim, sizes, group.rank())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = _Gather.apply(grads[0], ctx.dim, ctx.sizes, ctx.group, 1.0)
        return grad if ctx.grad_scale == 1.0 else grad * ctx.grad_scale, None, None, None, None


class _Gather(Function):
    acts_on_parts = staticmethod(_along_another_dimension)
    joins_positions = True

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        dim: int,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
        grad_scale: float,
    ) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.group, ctx.grad_scale = dim, sizes, group, grad_scale
        return as_kept(primitives.gather_dim(tensor, dim, sizes, group), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = _Scatter.apply(grads[0], ctx.dim, ctx.sizes, ctx.group, 1.0)
        return grad if ctx.grad_scale == 1.0 else grad * ctx.grad_scale, None, None, None, None


class _ReduceScatter(Function):
    acts_on_parts = staticmethod(_along_another_dimension)
    joins_positions = False

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return primitives.reduce_scatter_dim(tensor, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _GatherForSum.apply(grads[0], ctx.dim, ctx.sizes, ctx.group), None, None, None


class _GatherForSum(Function):
    """All-gather whose backward is a reduce-scatter."""

    acts_on_parts = staticmethod(_along_another_dimension)
    joins_positions = True

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return as_kept(primitives.gather_dim(tensor, dim, sizes, group), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ReduceScatter.apply(grads[0], ctx.dim, ctx.sizes, ctx.group), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.reverse = (concat_dim, concat_sizes, split_dim, split_sizes, group)
        return primitives.all_to_all_dims(tensor, split_dim, split_sizes, concat_dim, concat_sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllToAll.apply(grads[0], *ctx.reverse), None, None, None, None, None


def copy(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Hands a full tensor to computations that differ by rank: it is the identity, and its backward sums the gradients.

    Put it where an activation that all ranks have enters a region in which each rank computes its own part.

    Args:
        tensor: of any shape, the same on every rank.
        group: the ranks; by default the model-parallel group.

    Returns:
        A tensor of the same values.

    Raises:
        TypeError: `tensor` is a DTensor.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> x = torch.ones(3, requires_grad=True)
        >>> ts.distributed.copy(x).sum().backward()  # each rank's own gradient is 1
        >>> x.grad
        tensor([2., 2., 2.])
    """
    refuse_dtensor(tensor, "copy")
    process_group = resolve_group(group)
    if process_group.size() == 1:
        return tensor
    return _Copy.apply(tensor, process_group)


def reduce(tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The sum of `tensor` over the ranks, on every rank. The input is left as it is.

    Args:
        tensor: of any shape, the same shape on every rank.
        group: the ranks; by default the model-parallel group.

    Returns:
        The sum, of the shape of `tensor`.

    Raises:
        TypeError: `tensor` is a DTensor.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.reduce(torch.ones(3))
        tensor([2., 2., 2.])
    """
    refuse_dtensor(tensor, "reduce")
    process_group = resolve_group(group)
    if process_group.size() == 1:
        return tensor
    return _Reduce.apply(tensor, process_group)


def scatter(
    tensor: torch.Tensor, dim: int = -1, group: Group | None = None, *, grad_scale: float | None = None
) -> torch.Tensor:
    """This rank's shard, along `dim`, of a tensor that every rank holds in full.

    Args:
        tensor: the same on every rank.
        dim: along which it is cut.
        group: the ranks; by default the model-parallel group.
        grad_scale: multiplies the gradient of `tensor`; by default 1. Inside the forward of a
            ``DistributedDataParallel`` over n ranks of the group, and along dimension 0, that of the samples, it is
            1 / n by default: the opposite of what `gather` does there.

    Returns:
        The shard, marked as split along `dim`. The last ranks' may be smaller, or empty.

    Raises:
        IndexError: `tensor` has no dimension `dim`.
        TypeError: `tensor` is a DTensor.
        RuntimeError: there is no model-parallel group, and none was given; or this is called inside DDP, without
            `grad_scale`, while a reentrant ``torch.utils.checkpoint`` computes again.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> shard = ts.distributed.scatter(torch.randn(4, 6), dim=-1)
        >>> shard.shape, ts.get_parallel_dim(shard)
        (torch.Size([4, 3]), -1)
    """
    refuse_dtensor(tensor, "scatter")
    process_group = resolve_group(group)
    axis = normalize_dim(dim, tensor.ndim)
    size = tensor.size(axis)
    if process_group.size() == 1:
        shard = tensor.view_as(tensor)
    else:
        scale = 1 / ranks_averaged_by_ddp(tensor, dim, process_group) if grad_scale is None else grad_scale
        shard = _Scatter.apply(tensor, axis, shard_sizes(size, process_group.size()), process_group, scale)
    return set_mark(shard, ParallelMark(dim, size, process_group))


def gather(
    tensor: torch.Tensor,
    dim: int = -1,
    group: Group | None = None,
    *,
    size: int | None = None,
    grad_scale: float | None = None,
) -> torch.Tensor:
    """The ranks' tensors, concatenated along `dim`, on every rank.

    Args:
        tensor: this rank's. All ranks' have the same shape, except along `dim`. A DTensor that is split along `dim`,
            as FSDP2 makes them, is gathered over its own ranks.
        dim: along which the tensors are concatenated.
        group: the ranks; by default the model-parallel group.
        size: elements of the result along `dim`, if it is cut over the ranks as `scatter` cuts. Without it, the ranks
            first exchange their sizes, which may be anything.
        grad_scale: multiplies the gradient of `tensor`; by default 1. Inside the forward of a
            ``DistributedDataParallel`` over n ranks of the group, and along dimension 0, it is n by default. There each
            rank has other samples, and its gradient is a part of the gradient of the group's mean loss. These parts
            have to be added, but DDP averages them. With n, the result is the gradient of a single device.

    Returns:
        The concatenation, without a mark.

    Raises:
        IndexError: `tensor` has no dimension `dim`.
        ValueError: `size` is given and this rank does not hold its shard of it; the ranks' tensors differ in more
            than their size along `dim`; a DTensor is not split along `dim`, or over another group.
        RuntimeError: there is no model-parallel group, and none was given; or this is called inside DDP, without
            `grad_scale`, while a reentrant ``torch.utils.checkpoint`` computes again.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.gather(torch.randn(4, 3), dim=-1).shape
        torch.Size([4, 6])
    """
    check_tensor(tensor, "gather")
    if isinstance(tensor, DTensor):
        tensor, group, size = local_of(tensor, dim, group)
        grad_scale = 1.0 if grad_scale is None else grad_scale
    process_group = resolve_group(group)
    axis = normalize_dim(dim, tensor.ndim)
    if process_group.size() == 1:
        return tensor
    scale = ranks_averaged_by_ddp(tensor, dim, process_group) if grad_scale is None else grad_scale
    sizes = held_sizes(tensor, axis, size, process_group, "gather")
    return _Gather.apply(tensor, axis, sizes, process_group, float(scale))


def reduce_scatter(tensor: torch.Tensor, dim: int = -1, group: Group | None = None) -> torch.Tensor:
    """This rank's shard, along `dim`, of the sum of `tensor` over the ranks.

    Args:
        tensor: of the same shape on every rank.
        dim: along which the sum is cut.
        group: the ranks; by default the model-parallel group.

    Returns:
        The shard, marked as split along `dim`. The last ranks' may be smaller, or empty.

    Raises:
        IndexError: `tensor` has no dimension `dim`.
        TypeError: `tensor` is a DTensor.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.reduce_scatter(torch.ones(6))
        tensor([2., 2., 2.])
    """
    refuse_dtensor(tensor, "reduce_scatter")
    process_group = resolve_group(group)
    axis = normalize_dim(dim, tensor.ndim)
    size = tensor.size(axis)
    if process_group.size() == 1:
        shard = tensor.view_as(tensor)
    else:
        shard = _ReduceScatter.apply(tensor, axis, shard_sizes(size, process_group.size()), process_group)
    return set_mark(shard, ParallelMark(dim, size, process_group))


def all_to_all(
    tensor: torch.Tensor,
    split_dim: int,
    concat_dim: int,
    group: Group | None = None,
    *,
    size: int | None = None,
) -> torch.Tensor:
    """Turns a tensor that is split along `concat_dim` into one that is split along `split_dim`.

    Args:
        tensor: this rank's shard along `concat_dim`; full along `split_dim`.
        split_dim: along which the result is split.
        concat_dim: along which the result is full.
        group: the ranks; by default the model-parallel group.
        size: elements of the full tensor along `concat_dim`, if known; else the ranks first exchange what
            they hold.

    Returns:
        This rank's shard along `split_dim`, marked as such; full along `concat_dim`.

    Raises:
        IndexError: `tensor` has no such dimension.
        TypeError: `tensor` is a DTensor.
        ValueError: the dimensions are the same, or `size` is given and this rank does not hold its shard of
            it.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> tokens = torch.randn(5, 8)  # this rank's 5 of 10 tokens, with all 8 features
        >>> ts.distributed.all_to_all(tokens, split_dim=1, concat_dim=0).shape
        torch.Size([10, 4])
    """
    refuse_dtensor(tensor, "all_to_all")
    process_group = resolve_group(group)
    given, split_dim = split_dim, normalize_dim(split_dim, tensor.ndim)
    concat_dim = normalize_dim(concat_dim, tensor.ndim)
    if split_dim == concat_dim:
        raise ValueError(f"all_to_all was asked to split and to concatenate along the same dimension, {split_dim}")
    full_size = tensor.size(split_dim)
    if process_group.size() == 1:
        shard = tensor.view_as(tensor)
    else:
        concat_sizes = held_sizes(tensor, concat_dim, size, process_group, "all_to_all")
        split_sizes = shard_sizes(full_size, process_group.size())
        shard = _AllToAll.apply(tensor, split_dim, split_sizes, concat_dim, concat_sizes, process_group)
    return set_mark(shard, ParallelMark(given, full_size, process_group))


def gather_for_sum(
    tensor: torch.Tensor, dim: int = -1, group: Group | None = None, *, size: int | None = None
) -> torch.Tensor:
    """Gathers as :func:`gather` does, for a result from which each rank computes something different: backward sums the
    ranks' gradients, and each rank gets its slice of the sum.

    With it, a sequence that is split between tensor-parallel regions enters one of them (Korthikanti et al. 2022).

    Args:
        tensor: this rank's. All ranks' have the same shape, except along `dim`.
        dim: along which the tensors are concatenated.
        group: the ranks; by default the model-parallel group.
        size: elements of the result along `dim`, if known; else the ranks first exchange what they hold.

    Returns:
        The concatenation, without a mark.

    Raises:
        IndexError: `tensor` has no dimension `dim`.
        TypeError: `tensor` is a DTensor.
        ValueError: `size` is given and this rank does not hold its shard of it; the ranks' tensors differ in more
            than their size along `dim`.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.gather_for_sum(torch.randn(5, 8), dim=0).shape
        torch.Size([10, 8])
    """
    refuse_dtensor(tensor, "gather_for_sum")
    process_group = resolve_group(group)
    dim = normalize_dim(dim, tensor.ndim)
    if process_group.size() == 1:
        return tensor
    sizes = held_sizes(tensor, dim, size, process_group, "gather_for_sum")
    return _GatherForSum.apply(tensor, dim, sizes, process_group)


def ranks_averaged_by_ddp(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> int:
    """How many ranks of `group` have gradients that are to be added and that ``DistributedDataParallel`` averages.

    Inside DDP's forward, dimension 0 is that of samples, and each rank has different ones. In backward each rank then
    has its own part of the gradient. These parts have to be added, but DDP averages them.

    Args:
        tensor: what is gathered or scattered. A tensor that was computed from split parameters alone has no samples,
            and DDP averages none of its gradients.
        dim: as the user gave it: 0 is the dimension of samples; -1 is that of features, even if there is only one.
        group: the ranks of the gather or scatter.

    Returns:
        The number of ranks; 1 if DDP averages nothing that has to be added.

    Raises:
        RuntimeError: a reentrant ``torch.utils.checkpoint`` is computing again during backward, where it is not
            known whether DDP called the forward.
    """
    along_samples = dim == 0 or (tensor.ndim > 1 and dim == -tensor.ndim)
    if not along_samples or not torch.is_grad_enabled() or not tensor.requires_grad or _is_of_split_parameters(tensor):
        return 1
    module = active_ddp_module()
    if module is not None:
        averaged = set(dist.get_process_group_ranks(module.process_group))
        return len(averaged.intersection(dist.get_process_group_ranks(group)))
    # A checkpoint with use_reentrant=False recomputes through such a hook, and keeps the graph of the first forward.
    if is_in_backward() and not are_saved_tensors_hooked():
        raise RuntimeError(
            "a gather or scatter along dimension 0 is being computed again by torch.utils.checkpoint with "
            "use_reentrant=True, where it cannot be seen whether DistributedDataParallel will average the gradient: "
            "use use_reentrant=False, or say grad_scale=get_group_size() (1 / get_group_size() for scatter) under "
            "DistributedDataParallel, grad_scale=1 elsewhere"
        )
    return 1


def _is_of_split_parameters(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was computed from split parameters alone. A tensor that nothing computed, such as the model's
    input, counts as one, as it does for DDP.

    The search ends at the first other parameter, which is usually a few steps away.
    """
    if tensor.is_leaf:
        return is_split(tensor) or not isinstance(tensor, nn.Parameter)
    pending, seen = [tensor.grad_fn], {tensor.grad_fn}
    while pending:
        node: Any = pending.pop()
        before = {following for following, _ in node.next_functions if following is not None}
        if not before and not (hasattr(node, "variable") and is_split(node.variable)):
            return False
        pending += before - seen
        seen |= before
    return True
