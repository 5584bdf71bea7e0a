"""Cross entropy of logits whose classes are split over a group.

No rank ever holds all classes of a sample. Each computes the log-sum-exp of its own classes; one exchange of
two or three numbers per sample and rank then gives everybody the whole loss (the idea of Megatron-LM's
vocabulary-parallel cross entropy, with one exchange in place of three). Backward needs no communication.
Nothing but the logits themselves and one number per sample is kept between forward and backward, and
temporaries are of a fixed size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from tensorshard.comm import primitives
from tensorshard.comm.groups import Group, resolve_group
from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharding import normalize_dim
from tensorshard.layers.arguments import check_same_ranks
from tensorshard.layers.logits_and_targets import check_targets, place, refuse_lost_mark

# Elements of a temporary: on the CPU what stays in a core's cache, elsewhere enough to fill a GPU.
_CPU_TILE = 1 << 18
_DEVICE_TILE = 1 << 24


@dataclass(frozen=True)
class _Spec:
    """What a loss is to be computed of, besides its tensors."""

    start: int  # the first class of this rank
    classes: int  # of all ranks
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    group: dist.ProcessGroup | None  # None where the logits are whole


class _CrossEntropy(Function):
    """loss_i = (1 - s) w[t] (lse - z_t) + s / C sum_j w_j (lse - z_j) + zeta lse^2, for sample i of target t.

    C is the number of classes of all ranks, s the label smoothing, w the class weights, lse the log-sum-exp
    of the logits z, and zeta the z-loss (Chowdhery et al. 2022).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor | None, spec: _Spec
    ) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        weight = None if weight is None else weight.to(wide)
        columns, here = _target_columns(targets, spec.start, logits.size(1))
        lse, target_logit, weighted_sum = _combine(_statistics(logits, columns, here, weight, spec, wide), spec)

        valid = targets != spec.ignore_index
        target_weight = valid.to(wide) if weight is None else weight[targets.where(valid, 0)] * valid
        total_weight = float(spec.classes) if weight is None else weight.sum()
        losses = (1 - spec.label_smoothing) * target_weight * (lse - target_logit).where(valid, 0)
        if spec.label_smoothing:
            smooth = total_weight * lse - weighted_sum
            losses = losses + (spec.label_smoothing / spec.classes) * smooth.where(valid, 0)
        squares = (spec.z_loss * lse.square()).where(valid, 0) if spec.z_loss else None

        ctx.spec, ctx.wide = spec, wide
        normalizer, count = target_weight.sum(), valid.sum()
        ctx.save_for_backward(logits, columns, here, weight, lse, valid, target_weight, normalizer, count)
        if spec.reduction == "none":
            return losses if squares is None else losses + squares
        total = losses.sum()
        if spec.reduction == "sum":
            return total if squares is None else total + squares.sum()
        mean = total / normalizer
        return mean if squares is None else mean + squares.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, columns, here, weight, lse, valid, target_weight, normalizer, count = ctx.saved_tensors
        spec: _Spec = ctx.spec
        grad = grads[0].to(ctx.wide)
        of_loss = (grad / normalizer if spec.reduction == "mean" else grad).where(valid, 0)
        smoothing = of_loss * (spec.label_smoothing / spec.classes)
        total_weight = spec.classes if weight is None else weight.sum()
        of_target = (1 - spec.label_smoothing) * of_loss * target_weight
        of_softmax = of_target + smoothing * total_weight
        if spec.z_loss:
            of_square = (grad / count if spec.reduction == "mean" else grad).where(valid, 0)
            of_softmax = of_softmax + 2 * spec.z_loss * of_square * lse
        local_weight = None
        if spec.label_smoothing:
            local_weight = (
                logits.new_ones(logits.size(1), dtype=ctx.wide) if weight is None else _own(weight, logits, spec)
            )

        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _tiles(logits):
            # exp(z - lse) is the softmax; written where it stays if the type allows, else into a tile of a
            # wider type.
            tile = grad_logits[rows]
            if tile.dtype == ctx.wide:
                torch.sub(logits[rows], lse[rows, None], out=tile)
            else:
                tile = logits[rows].to(ctx.wide).sub_(lse[rows, None])
            tile.exp_().mul_(of_softmax[rows, None])
            if local_weight is not None:
                tile.addr_(smoothing[rows], local_weight, alpha=-1)
            if logits.size(1):
                tile.scatter_add_(1, columns[rows, None], -(of_target * here)[rows, None])
            if tile.dtype != grad_logits.dtype:
                grad_logits[rows] = tile
        return grad_logits, None, None, None


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
    group: Group | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of whole logits, or of logits whose classes are split over a group.

    Which of the two is read from the mark on `input`: a parallel layer marks its output,
    :func:`tensorshard.register_parallel_dim` marks what comes of it by other operations.

    Args:
        input: logits [N, C], [C], or [N, C, d1, ...]; if split, also [d1, ..., C] with the last dimension
            marked. Sums are taken in fp32 where the logits are of a narrower type, and the loss of split
            logits is then fp32.
        target: classes, numbered over all ranks, of the shape of `input` without the class dimension; the
            same on every rank. For whole logits also class probabilities, as in ``F.cross_entropy``.
        weight: [C]: of all classes, on every rank.
        size_average, reduce: deprecated, as in ``F.cross_entropy``.
        ignore_index, reduction, label_smoothing: as in ``F.cross_entropy``. Smoothing counts the classes of
            all ranks.
        z_loss: this times the squared log-sum-exp is added per target that is not ignored (Chowdhery et al.
            2022); with "mean", its mean over those.
        group: the ranks that hold the classes; by default those in the mark, else the model-parallel group.

    Returns:
        The loss, the same on every rank of the group.

    Raises:
        IndexError: a target outside the classes.
        ValueError: shapes that do not fit; split logits without a mark; a mark on whole ones; an unknown
            reduction.
    """
    if has_torch_function_unary(input):  # logits of a Plan
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
            group=group,
        )
    if size_average is not None or reduce is not None:
        reduction = nn.CrossEntropyLoss(size_average=size_average, reduce=reduce).reduction  # as torch reads them
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r} was given: use 'none', 'mean' or 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} was given: use a number from 0 to 1")
    mark = get_mark(input)
    if mark is None:
        refuse_lost_mark(input)
        if z_loss == 0:
            return F.cross_entropy(
                input,
                target,
                weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )
        class_dim = 0 if input.ndim == 1 else 1
        start, classes, process_group = 0, input.size(class_dim), None
    else:
        class_dim = normalize_dim(mark.dim, input.ndim)
        process_group = mark.group or resolve_group(group)
        check_same_ranks(process_group, group, "input")
        start, classes = place(
            input, class_dim, mark.size or (None if weight is None else weight.numel()), process_group
        )
    check_targets(input, target, class_dim, classes, weight=weight, ignore_index=ignore_index)
    spec = _Spec(start, classes, ignore_index, label_smoothing, z_loss, reduction, process_group)
    logits = input.movedim(class_dim, -1)
    loss = _CrossEntropy.apply(logits.reshape(target.numel(), logits.size(-1)), target.flatten(), weight, spec)
    return loss.view(target.shape) if reduction == "none" else loss


def _target_columns(targets: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per sample: the local column of its target, 0 if it is held elsewhere; and whether it is held here."""
    columns = targets - start
    here = (columns >= 0) & (columns < width)
    return columns.where(here, 0), here


def _statistics(
    logits: torch.Tensor,
    columns: torch.Tensor,
    here: torch.Tensor,
    weight: torch.Tensor | None,
    spec: _Spec,
    wide: torch.dtype,
) -> torch.Tensor:
    """[2 or 3, N]: of this rank's classes the log-sum-exp, the target's logit or 0, the weighted sum."""
    statistics = logits.new_zeros((3 if spec.label_smoothing else 2, logits.size(0)), dtype=wide)
    statistics[0] = -torch.inf
    if logits.size(1) == 0:
        return statistics
    local_weight = None if weight is None else _own(weight, logits, spec)
    for rows in _tiles(logits):
        tile = logits[rows].to(wide)
        torch.logsumexp(tile, 1, out=statistics[0, rows])
        if spec.label_smoothing:
            statistics[2, rows] = tile.sum(1) if local_weight is None else tile.mv(local_weight)
    picked = logits.gather(1, columns[:, None]).squeeze(1).to(wide)
    statistics[1] = picked.where(here, 0)
    return statistics


def _combine(statistics: torch.Tensor, spec: _Spec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log-sum-exp, target logit and weighted sum over the classes of all ranks, each [N]."""
    parts = statistics[None] if spec.group is None else primitives.gather_flat(statistics, spec.group)
    sums = parts[:, 1:].sum(0)
    return parts[:, 0].logsumexp(0), sums[0], sums[-1]


def _own(weight: torch.Tensor, logits: torch.Tensor, spec: _Spec) -> torch.Tensor:
    return weight.narrow(0, spec.start, logits.size(1))


def _tiles(logits: torch.Tensor) -> Iterator[slice]:
    """Rows of `logits`, as many at a time as make a tile."""
    tile = _CPU_TILE if logits.device.type == "cpu" else _DEVICE_TILE
    step = max(1, tile // max(1, logits.size(1)))
    for begin in range(0, logits.size(0), step):
        yield slice(begin, begin + step)
