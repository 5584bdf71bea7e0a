"""Cross entropy of logits whose classes are split over a group.

No rank ever holds all classes of a sample. Backward needs no communication. Nothing but the logits themselves and two
numbers per sample is kept between forward and backward, and temporaries are of a fixed size. The formulas are in
:mod:`tensorshard.loss.formulas`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function_unary

from tensorshard.comm.differentiable import gather
from tensorshard.comm.groups import Group, resolve_group
from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharding import normalize_dim
from tensorshard.comm.world import world
from tensorshard.common.sampled_loops import loop_slices
from tensorshard.layers.arguments import check_same_ranks
from tensorshard.loss.formulas import (
    CrossEntropySpec,
    Statistics,
    cap,
    cap_slope,
    combine,
    find_slopes,
    local_columns,
    reduce_loss,
    set_target_slopes,
    softmax_slope,
    token_accuracy,
    weigh_targets,
)
from tensorshard.loss.loss_arguments import ClassShard, check_targets, find_class_shard, refuse_lost_mark

# Elements of a temporary: on the CPU what stays in a core's cache, elsewhere enough to fill a GPU.
_CPU_TILE = 1 << 18
_DEVICE_TILE = 1 << 24


class _CrossEntropy(Function):
    """The loss and the optional outputs, from this rank's columns of the logits, which begin at class `start`.

    It works on some rows of the logits at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        start: int,
        group: dist.ProcessGroup | None,
        spec: CrossEntropySpec,
    ) -> tuple[torch.Tensor | None, ...]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        class_weight = None if class_weight is None else class_weight.to(wide)
        own_weight = _own_weight(class_weight, logits, start)
        statistics = combine(_statistics(logits, targets, own_weight, start, spec, wide), group)
        weights = weigh_targets(targets, class_weight, spec, statistics.lse.dtype)
        ctx.start, ctx.spec, ctx.group = start, spec, group
        ctx.mean_over = weights.normalizer if spec.reduction == "mean" else None  # see means_of
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, class_weight, statistics.lse, statistics.target_logit)
        accuracy = token_accuracy(statistics, weights, spec)
        if accuracy is not None:
            ctx.mark_non_differentiable(accuracy)
        loss = reduce_loss(statistics, weights, spec).to(wide)
        return loss, statistics.lse.to(wide, copy=True) if spec.return_lse else None, accuracy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _twice_differentiable(ctx, grads), *[None] * 5
        logits, targets, class_weight, lse, target_logit = ctx.saved_tensors
        spec: CrossEntropySpec = ctx.spec
        weights = weigh_targets(targets, class_weight, spec, lse.dtype)
        slopes = find_slopes(grads[0], grads[1], Statistics(lse, target_logit), weights, spec)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # What is subtracted from the logits has their type. A factor for each sample makes up for its rounding.
        reference = lse.to(wide)
        left_out = (reference - lse).exp().where(lse.isfinite(), 1)
        of_softmax = (slopes.of_softmax * left_out).to(wide)
        smoothing = None if slopes.smoothing is None else slopes.smoothing.to(wide)
        at_target = slopes.at_target.to(wide)
        columns, is_local = local_columns(targets, spec.ignore_index, ctx.start, logits.size(1))
        own_weight = _own_weight(class_weight, logits, ctx.start)
        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _tiles(logits):
            tile, inner = logits[rows], None
            if spec.softcap is not None:
                tile = cap(tile.to(wide, copy=True), spec.softcap)
                inner = cap_slope(tile, spec.softcap, torch.empty_like(tile))
            # Written to its final place if the type allows, else over a tile of a wider type.
            stays = grad_logits[rows] if logits.dtype == wide else None
            slope = softmax_slope(
                tile.to(wide),
                reference[rows],
                of_softmax[rows, None],
                None if smoothing is None else smoothing[rows],
                own_weight,
                stays,
            )
            if logits.size(1):
                set_target_slopes(slope, columns[rows, None], is_local[rows, None], at_target[rows, None])
            if inner is not None:
                slope.mul_(inner)
            if stays is None:
                grad_logits[rows] = slope
        return grad_logits, *[None] * 5


def _twice_differentiable(ctx: Any, grads: Any) -> torch.Tensor:
    """What the backward of :class:`_CrossEntropy` returns, in a graph for another backward. It holds all classes."""
    logits, targets, class_weight, *_ = ctx.saved_tensors
    spec: CrossEntropySpec = ctx.spec
    full = logits if ctx.group is None else gather(logits, -1, ctx.group, size=spec.classes)
    wide = full.double() if spec.softcap is None else spec.softcap * torch.tanh(full.double() / spec.softcap)
    columns, is_local = local_columns(targets, spec.ignore_index, 0, spec.classes)
    weighted_sum = None
    if spec.label_smoothing:
        weighted_sum = wide.sum(1) if class_weight is None else wide.mv(class_weight.double())
    statistics = Statistics(
        wide.logsumexp(1), wide.gather(1, columns[:, None]).squeeze(1).where(is_local, 0), weighted_sum
    )
    weights = weigh_targets(targets, class_weight, spec, wide.dtype)
    sources = [(reduce_loss(statistics, weights, spec), grads[0]), (statistics.lse, grads[1])]
    given = [(source, grad.double()) for source, grad in sources if grad is not None]
    if not given:
        return torch.zeros_like(logits)
    outputs, of_outputs = zip(*given, strict=True)
    (of_logits,) = torch.autograd.grad(outputs, logits, of_outputs, create_graph=True)
    return of_logits


def parallel_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    use_token_scaling: bool = False,
    return_lse: bool = False,
    return_token_accuracy: bool = False,
    group: Group | None = None,
) -> Any:
    """``F.cross_entropy`` of full logits, or of logits whose classes are split over a group.

    The mark on `input` says which of the two it is. A parallel layer marks its output. After other operations,
    :func:`tensorshard.register_parallel_dim` marks the result.

    Args:
        input: logits [N, C], [C], or [N, C, d1, ...]; if split, also [d1, ..., C] with the last dimension
            marked. If the logits are narrower than fp32, sums are taken in fp32, and the loss of split logits is fp32.
        target: class numbers, counted over all ranks, of the shape of `input` without the class dimension; the
            same on every rank. For full logits also class probabilities, as in ``F.cross_entropy``.
        weight: [C]: the weights of all classes, on every rank.
        size_average, reduce: deprecated, as in ``F.cross_entropy``.
        ignore_index, reduction, label_smoothing: as in ``F.cross_entropy``. Smoothing counts the classes of
            all ranks.
        z_loss: this times the squared log-sum-exp is added for each target that is not ignored (Chowdhery et al.
            2022); with "mean", its mean over these targets.
        softcap: the loss is that of softcap * tanh(logits / softcap) (Gemma 2, 2024); None: of the logits as they are.
        use_token_scaling: whether each target's loss, z-loss included, is multiplied by the probability that the
            softmax gives the target, taken as a constant (dynamic fine-tuning: Wu et al. 2025). The number by which
            "mean" divides does not change.
        return_lse, return_token_accuracy: whether the log-sum-exp and the accuracy are returned, too.
        group: the ranks that hold the classes; by default those in the mark, else the model-parallel group.

    Returns:
        The loss, the same on every rank of the group. With any ``return_`` option a
        :class:`tensorshard.nn.CrossEntropyOutput`.

    Raises:
        IndexError: a target is outside the classes.
        ValueError: shapes do not fit; split logits have no mark, or full ones have one; an option is out of its range;
            class probabilities are given with an option that ``F.cross_entropy`` does not have.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> logits = ts.register_parallel_dim(torch.zeros(8, 500), -1)  # this rank's half of 1000 classes
        >>> ts.nn.functional.parallel_cross_entropy(logits, torch.arange(8))
        tensor(6.9078)
    """
    if has_torch_function_unary(input):  # a subclass of Tensor, as a model under a Plan may return
        return handle_torch_function(
            parallel_cross_entropy,
            (input,),
            input,
            target,
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            use_token_scaling=use_token_scaling,
            return_lse=return_lse,
            return_token_accuracy=return_token_accuracy,
            group=group,
        )
    if size_average is not None or reduce is not None:
        reduction = nn.CrossEntropyLoss(size_average=size_average, reduce=reduce).reduction  # as torch reads them
    mark = get_mark(input)
    named = None if mark is None else mark.dim
    class_dim = min(1, input.ndim - 1) if named is None else normalize_dim(named, input.ndim)
    options = CrossEntropySpec(
        input.size(class_dim),
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        softcap,
        use_token_scaling,
        return_lse,
        return_token_accuracy,
    )
    if mark is None:
        refuse_lost_mark(input)
        if options == CrossEntropySpec(options.classes, ignore_index, label_smoothing, reduction=reduction):
            return F.cross_entropy(
                input,
                target,
                weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )
        class_shard = ClassShard(0, options.classes, None)
    else:
        process_group = mark.group or resolve_group(group)
        check_same_ranks(process_group, group, "input")
        class_shard = find_class_shard(
            input.size(class_dim),
            mark.size or (None if weight is None else weight.numel()),
            process_group,
            input.device,
            f"logits {list(input.shape)}, marked as split along dimension {class_dim}, were",
            "take the mark off with register_parallel_dim(x, None)",
        )
        options = replace(options, classes=class_shard.classes)
    shape = torch.Size([size for dim, size in enumerate(input.shape) if dim != class_dim])
    given = f"logits {list(input.shape)}, whose classes are along dimension {class_dim}"
    check_targets(target, shape, given, options, weight, "weight")
    logits = input.movedim(class_dim, -1)
    logits = logits.reshape(target.numel(), logits.size(-1))
    loss, lse, accuracy = _CrossEntropy.apply(
        logits, target.flatten(), weight, class_shard.start, class_shard.group, options
    )
    return options.result(loss, lse, accuracy, target.shape)


def _statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    own_weight: torch.Tensor | None,
    start: int,
    spec: CrossEntropySpec,
    wide: torch.dtype,
) -> Statistics:
    """The statistics of this rank's classes, in fp64: fp32 would round the log-sum-exp of large logits too much."""
    samples, width = logits.shape
    lse = logits.new_full((samples,), -torch.inf, dtype=torch.float64)
    zeros = logits.new_zeros((3, samples), dtype=torch.float64)
    weighted_sum = zeros[1] if spec.label_smoothing else None
    largest, hit = (lse.clone(), zeros[2]) if spec.return_token_accuracy else (None, None)
    if width == 0:
        return Statistics(lse, zeros[0], weighted_sum, largest, hit)
    columns, is_local = local_columns(targets, spec.ignore_index, start, width)
    for rows in _tiles(logits):
        tile = logits[rows].to(wide, copy=spec.softcap is not None)
        tile = tile if spec.softcap is None else cap(tile, spec.softcap)
        lse[rows] = _log_sum_exp(tile)
        if weighted_sum is not None:
            weighted_sum[rows] = tile.sum(1) if own_weight is None else tile.mv(own_weight)
        if largest is not None and hit is not None:
            largest[rows], first = tile.max(1)
            hit[rows] = ((first == columns[rows]) & is_local[rows]).to(hit.dtype)
    picked = logits.gather(1, columns[:, None]).squeeze(1).to(wide)
    picked = picked if spec.softcap is None else cap(picked, spec.softcap)
    return Statistics(lse, picked.where(is_local, 0), weighted_sum, largest, hit)


def _log_sum_exp(tile: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of each row, in fp64; the exponentials are of the type of the tile."""
    largest = tile.amax(1)
    finite = largest.where(largest.isfinite(), 0)
    return tile.sub(finite[:, None]).exp_().sum(1).double().log_().add_(finite)


def _own_weight(class_weight: torch.Tensor | None, logits: torch.Tensor, start: int) -> torch.Tensor | None:
    """This rank's part of the class weights."""
    return None if class_weight is None else class_weight.narrow(0, start, logits.size(1))


def _tiles(logits: torch.Tensor) -> Iterable[slice]:
    """Rows of `logits`, as many at a time as make a tile."""
    tile = _CPU_TILE if world().on_cpu(logits.device) else _DEVICE_TILE
    step = max(1, tile // max(1, logits.size(1)))
    return loop_slices([slice(begin, begin + step) for begin in range(0, logits.size(0), step)])
