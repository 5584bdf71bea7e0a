"""The tiled loss as operations of autograd. Gradients are computed in backward, or in forward some rows at a time.

Whatever is done with a scalar loss later only multiplies its gradients by a factor. So once the log-sum-exps of some
rows are known, the gradients may be computed from their logits at once (:func:`loss_with_gradients`). No logits are
computed twice, and only those of some rows are ever kept. (Liger Kernel computes a fused linear cross entropy this way,
a chunk of rows at a time. Here the classes of a chunk are computed a tile at a time, too, so that softmax finds each
tile in the cache.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from tensorshard.comm import primitives
from tensorshard.comm.world import world
from tensorshard.common.sampled_loops import loop_slices
from tensorshard.loss.formulas import (
    Statistics,
    TargetWeights,
    find_slopes,
    reduce_loss,
    token_accuracy,
    weigh_targets,
)
from tensorshard.loss.tiles import Columns, Tiles, without_autocast
from tensorshard.loss.two_passes import (
    HEAD_LOSS,
    BackwardOptimizer,
    Gradients,
    HeadSpec,
    OwnLogits,
    SummedGradients,
    run_backward,
    run_forward,
)
from tensorshard.torch_private.dispatch import has_dispatch_mode


def once_differentiable(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As ``torch.autograd.function.once_differentiable``, with a sentence that names `what`, and what to use instead.

    torch's own takes the gradient for a constant if the gradient that arrives is one, as that of a loss is. A second
    backward would then miss terms.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            asked = torch.is_grad_enabled()
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            if not asked:
                return gradients
            given = [value for value in gradients if isinstance(value, torch.Tensor)]
            refusing = iter(_Refusing.apply(what, torch.zeros((), requires_grad=True), *given) if given else ())
            return tuple(next(refusing) if isinstance(value, torch.Tensor) else value for value in gradients)

        return run

    return decorate


class _Refusing(Function):
    @staticmethod
    def forward(ctx: Any, what: str, _: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.what = what
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"a gradient of {ctx.what} was differentiated again, and that has no second derivative")


@dataclass(frozen=True)
class Extras:
    """Options that only the module uses.

    Args:
        sample: this rank's classes to compute with, ascending, including all its targets; None for all classes.
        optimizer: what updates the weight in backward.
        sum_input_grad: whether backward sums the input's gradient over the group; else the caller does.
        casts: whether the input may be of another type than the weight, as in a head with a weight in bf16.
    """

    sample: torch.Tensor | None = None
    optimizer: BackwardOptimizer | None = None
    sum_input_grad: bool = True
    casts: bool = False


class _Head(Function):
    """The loss and the optional outputs: see :mod:`tensorshard.loss.formulas`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor | None,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        sample: torch.Tensor | None,
        spec: HeadSpec,
    ) -> tuple[torch.Tensor | None, ...]:
        precision, options = spec.precision, spec.loss
        with without_autocast(input):
            norms = input.new_empty(len(weight), dtype=precision.wide) if spec.normalize else None
            tiles = Tiles(input.to(precision.compute), weight, bias, sample, norms, precision)
            columns = Columns(targets, options.ignore_index, spec.start, len(weight), sample)
            statistics, own = run_forward(tiles, columns, _own_weight(class_weight, weight, spec), spec)
            weights = weigh_targets(targets, class_weight, options, torch.float64)
            loss = reduce_loss(statistics, weights, options)
            accuracy = token_accuracy(statistics, weights, options)
        ctx.spec = spec
        ctx.mean_over = weights.normalizer if options.reduction == "mean" else None  # see means_of
        ctx.set_materialize_grads(False)
        # Saved tensors must not share memory with the result, or they would keep it alive. All are made here.
        ctx.save_for_backward(
            input, weight, bias, targets, class_weight, sample, norms, statistics.lse, statistics.target_logit, *own
        )
        if accuracy is not None:
            ctx.mark_non_differentiable(accuracy)
        lse = statistics.lse.to(precision.wide, copy=True) if options.return_lse else None
        return loss.to(precision.wide), lse, accuracy

    @staticmethod
    @once_differentiable(HEAD_LOSS)
    def backward(ctx: Any, *grads: Any) -> Any:
        spec: HeadSpec = ctx.spec
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if spec.optimizer is not None:
            spec.optimizer.check_unchanged(spec.step)
        input, weight, bias, targets, class_weight, sample, norms, lse, target_logit, *rest = ctx.saved_tensors
        precision = spec.precision
        with without_autocast(input):
            tiles = Tiles(input.to(precision.compute), weight, bias, sample, norms, precision)
            columns = Columns(targets, spec.loss.ignore_index, spec.start, len(weight), sample)
            weights = weigh_targets(targets, class_weight, spec.loss, torch.float64)
            slopes = find_slopes(grads[0], grads[1], Statistics(lse, target_logit), weights, spec.loss)
            sink: Any = None
            if spec.optimizer is not None:
                sink = spec.optimizer.begin(tiles)
            elif needs_weight or needs_bias:
                sink = Gradients(tiles, weight if needs_weight else None, bias if needs_bias else None)
            total = torch.zeros_like(input, dtype=precision.wide) if needs_input else None
            own_weight = _own_weight(class_weight, weight, spec)
            run_backward(tiles, columns, own_weight, lse, OwnLogits(*rest), slopes, sink, total, spec)
            if spec.optimizer is not None:
                spec.optimizer.end()
            if total is not None and spec.group is not None and spec.sum_input_grad:
                primitives.all_reduce(total, spec.group)
        grad_input = None if total is None else total.to(input.dtype)
        if spec.optimizer is not None or sink is None:
            return grad_input, *[None] * 7
        return grad_input, sink.weight, sink.bias, *[None] * 5


def head_loss(
    input: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    spec: HeadSpec,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss of an input [*, D] and targets [N], which were checked, and the optional outputs; unreduced, each is
    [N].

    Args:
        weight, bias: this rank's part.
        class_weight: of all classes.
    """
    flat = input.reshape(-1, input.size(-1))
    if spec.normalize:
        flat = F.normalize(flat.to(spec.precision.wide), dim=1)
    if spec.scale != 1.0:
        flat = flat * spec.scale
    wanted = (flat, weight, bias) if extras.optimizer is None else (flat,)
    backward = torch.is_grad_enabled() and (
        extras.optimizer is not None or any(t is not None and t.requires_grad for t in wanted)
    )
    optimizer = extras.optimizer if backward else None
    # An update is made in backward even if nothing else needs a gradient. Autograd then calls backward for the anchor.
    anchor = torch.zeros((), requires_grad=True) if optimizer is not None else None
    spec = replace(
        spec,
        keep=spec.keep if backward else None,
        sum_input_grad=extras.sum_input_grad,
        optimizer=optimizer,
        step=0 if optimizer is None else optimizer.group["step"],
    )
    if class_weight is not None:
        class_weight = class_weight.to(spec.precision.wide)
    if optimizer is not None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return _Head.apply(flat, weight, bias, anchor, targets, class_weight, extras.sample, spec)


def _own_weight(class_weight: torch.Tensor | None, weight: torch.Tensor, spec: HeadSpec) -> torch.Tensor | None:
    """This rank's part of the class weights."""
    return None if class_weight is None else class_weight.narrow(0, spec.start, len(weight))


# The logits of some rows take about this many bytes; more if the weight itself takes several times as many.
_CPU_BYTES = 64 << 20
_DEVICE_BYTES = 512 << 20
_FEWEST = 64


def rows_at_once(classes: int, weight_bytes: int, device: torch.device) -> int:
    """How many rows' logits are held at a time."""
    size = max(_CPU_BYTES if world().on_cpu(device) else _DEVICE_BYTES, weight_bytes // 4)
    return max(_FEWEST, size // (4 * max(1, classes)) // _FEWEST * _FEWEST)


class _Gradients:
    """The loss and the gradients of one call. The gradients are those of 1 times the loss."""

    def __init__(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        needed: tuple[bool, ...],
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        spec: HeadSpec,
    ) -> None:
        input, weight, bias = tensors
        wide = spec.precision.wide
        weights = weigh_targets(targets, class_weight, spec.loss, torch.float64)
        own_weight = _own_weight(class_weight, weight, spec)
        sink = SummedGradients(weight if needed[1] else None, bias if needed[2] else None, wide)
        total = torch.zeros_like(input, dtype=wide, memory_format=torch.contiguous_format) if needed[0] else None
        lse = input.new_empty(len(input), dtype=torch.float64)
        picked, smoothed = torch.empty_like(lse), torch.empty_like(lse) if spec.loss.label_smoothing else None
        room: torch.Tensor | None = None
        spec = replace(spec, keep=wide)
        one = lse.new_ones(())
        for rows in _runs(len(input), len(weight), weight.nbytes, input.device):
            part = input[rows]
            if room is None:
                room = part.new_empty(len(part) * len(weight), dtype=wide)
            tiles = Tiles(part.to(spec.precision.compute), weight, bias, None, None, spec.precision)
            columns = Columns(targets[rows], spec.loss.ignore_index, spec.start, len(weight), None)
            statistics, own = run_forward(tiles, columns, own_weight, spec, room)
            lse[rows], picked[rows] = statistics.lse, statistics.target_logit
            if smoothed is not None and statistics.weighted_sum is not None:
                smoothed[rows] = statistics.weighted_sum
            of_rows = TargetWeights(
                weights.valid[rows], weights.num_valid, weights.of_target[rows], weights.normalizer, weights.of_all
            )
            slopes = find_slopes(one, None, statistics, of_rows, spec.loss)
            sink.begin(tiles)
            run_backward(
                tiles,
                columns,
                own_weight,
                statistics.lse,
                own,
                slopes,
                sink if needed[1] or needed[2] else None,
                None if total is None else total[rows],
                spec,
            )
        self.loss = reduce_loss(Statistics(lse, picked, smoothed), weights, spec.loss).to(wide)
        self.mean_over = weights.normalizer if spec.loss.reduction == "mean" else None
        self.of_input, self.of_weight, self.of_bias = total, sink.weight, sink.bias

    def times(self, factor: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of `factor` times the loss. They are changed in place."""
        gradients = [self.of_input, self.of_weight, self.of_bias]
        if not _is_one(factor):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return gradients


class _LossWithGradients(Function):
    """A scalar loss; see :mod:`tensorshard.loss.formulas`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        spec: HeadSpec,
    ) -> torch.Tensor:
        ctx.spec = spec
        ctx.save_for_backward(input, weight, bias, targets, class_weight)
        with without_autocast(input):
            ctx.gradients = _Gradients((input, weight, bias), ctx.needs_input_grad[:3], targets, class_weight, spec)
        ctx.mean_over = ctx.gradients.mean_over  # see means_of
        return ctx.gradients.loss

    @staticmethod
    @once_differentiable(HEAD_LOSS)
    def backward(ctx: Any, *grads: Any) -> Any:
        spec: HeadSpec = ctx.spec
        input, weight, bias, targets, class_weight = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        with without_autocast(input):
            if gradients is None:  # a second backward: the first one gave the gradients to autograd
                gradients = _Gradients((input, weight, bias), ctx.needs_input_grad[:3], targets, class_weight, spec)
            of_input, of_weight, of_bias = gradients.times(grads[0])
            if of_input is not None and spec.group is not None and spec.sum_input_grad:
                primitives.all_reduce(of_input, spec.group)
        return (
            None if of_input is None else of_input.to(input.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
            *[None] * 3,
        )


def loss_with_gradients(
    input: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    spec: HeadSpec,
) -> torch.Tensor:
    """The loss of an input [N, D] and targets [N], which were checked: a scalar in the wide type.

    The gradients of the input, the weight and the bias are computed with it, and wait for backward; the weight's is
    as large as the weight.

    Args:
        weight, bias: this rank's part.
        class_weight: of all classes, in the wide type.
        spec: whose reduction is "mean" or "sum".
    """
    return _LossWithGradients.apply(input, weight, bias, targets, class_weight, spec)


def _runs(samples: int, classes: int, weight_bytes: int, device: torch.device) -> Iterable[slice]:
    step = rows_at_once(classes, weight_bytes, device)
    count = max(1, -(-samples // step))
    step = -(-samples // count)  # of about the same size, so that the last does not have only a few rows
    return loop_slices([slice(begin, min(begin + step, samples)) for begin in range(0, samples, step)])


def _is_one(factor: torch.Tensor) -> bool:
    """Whether `factor` is known to be 1. One on a GPU is not read, since that would wait for the GPU."""
    known = factor.device.type == "cpu" and type(factor) is torch.Tensor and not has_dispatch_mode()
    return known and factor.item() == 1.0
