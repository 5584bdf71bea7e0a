"""The head's loss as one operation of autograd."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tensorshard.comm import primitives
from tensorshard.heads.loss.gradient_sinks import Gradients
from tensorshard.heads.loss.head_spec import HeadSpec, without_autocast
from tensorshard.heads.loss.two_passes import Slopes, Statistics, run_backward, run_forward
from tensorshard.heads.tiles.tiles import Columns, Tiles
from tensorshard.heads.update.head_sgd import HeadSGD


@dataclass(frozen=True)
class Extras:
    """What only the module asks for.

    Args:
        sample: this rank's classes to compute with, ascending, among which are all its targets; None for all.
        optimizer: what updates the weight in backward.
        sum_input_grad: whether backward sums the input's gradient over the group; else the caller does.
        casts: whether the input may be of another type than the weight, as in a head with a weight in bf16.
    """

    sample: torch.Tensor | None = None
    optimizer: HeadSGD | None = None
    sum_input_grad: bool = True
    casts: bool = False


class _Head(Function):
    """loss_i = (1 - s) w[t] (lse - z_t) + s / C sum_j w_j (lse - z_j) + zeta lse^2, for sample i of target t.

    C is the number of classes of all ranks, s the label smoothing, w the class weights, lse the log-sum-exp of the
    logits z, and zeta the z-loss.
    """

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
    ) -> torch.Tensor:
        precision = spec.precision
        with without_autocast(input):
            norms = input.new_empty(len(weight), dtype=precision.wide) if spec.normalize else None
            tiles = Tiles(input.to(precision.compute), weight, bias, sample, norms, precision)
            columns = Columns(targets, spec.start, len(weight), sample)
            found = run_forward(tiles, columns, _own(class_weight, weight, spec), spec)
            weighing = _weigh(targets, class_weight, spec)
            loss = _reduce(found, weighing, class_weight, spec)
        ctx.spec, ctx.has_anchor = spec, anchor is not None
        # The result's own bytes are not to be kept alive by what is saved: all of it is made here.
        ctx.save_for_backward(input, weight, bias, targets, class_weight, sample, norms, *found)
        return loss.to(precision.wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        spec: HeadSpec = ctx.spec
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if spec.optimizer is not None:
            spec.optimizer.check_unchanged(spec.step)
        input, weight, bias, targets, class_weight, sample, norms, *rest = ctx.saved_tensors
        found = Statistics(*rest)
        precision = spec.precision
        with without_autocast(input):
            tiles = Tiles(input.to(precision.compute), weight, bias, sample, norms, precision)
            columns = Columns(targets, spec.start, len(weight), sample)
            slopes = _slopes(grads[0].double(), found, _weigh(targets, class_weight, spec), class_weight, spec)
            sink: Any = None
            if spec.optimizer is not None:
                sink = spec.optimizer.begin(tiles)
            elif needs_weight or needs_bias:
                sink = Gradients(tiles, weight if needs_weight else None, bias if needs_bias else None)
            total = torch.zeros_like(input, dtype=precision.wide) if needs_input else None
            run_backward(tiles, columns, _own(class_weight, weight, spec), found, slopes, sink, total, spec)
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
) -> torch.Tensor:
    """The loss of an input [*, D] and targets [N], which were checked; unreduced, it is [N].

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
    # An update is made in backward even where nothing else needs a gradient: the anchor has backward called.
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


@dataclass(frozen=True)
class _Weighing:
    """How much each sample's target counts ([N] fp64), which are not ignored ([N] bool), and the sums of both."""

    target: torch.Tensor
    valid: torch.Tensor
    normalizer: torch.Tensor
    count: torch.Tensor
    all_classes: torch.Tensor | float


def _weigh(targets: torch.Tensor, class_weight: torch.Tensor | None, spec: HeadSpec) -> _Weighing:
    valid = targets != spec.ignore_index
    if class_weight is None:
        target = valid.double()
        return _Weighing(target, valid, target.sum(), valid.sum(), float(spec.classes))
    target = class_weight[targets.where(valid, 0)].double() * valid
    return _Weighing(target, valid, target.sum(), valid.sum(), class_weight.double().sum())


def _reduce(found: Statistics, weighing: _Weighing, class_weight: torch.Tensor | None, spec: HeadSpec) -> torch.Tensor:
    valid = weighing.valid
    losses = (1 - spec.label_smoothing) * weighing.target * (found.log_sum - found.target_logit).where(valid, 0)
    if spec.label_smoothing:
        smooth = weighing.all_classes * found.log_sum - found.weighted_sum
        losses = losses + (spec.label_smoothing / spec.classes) * smooth.where(valid, 0)
    squares = (spec.z_loss * found.log_sum.square()).where(valid, 0)
    if spec.reduction == "none":
        return losses + squares
    if spec.reduction == "sum":
        return losses.sum() + squares.sum()
    mean = losses.sum() / weighing.normalizer
    return mean + squares.sum() / weighing.count if spec.z_loss else mean


def _slopes(
    grad: torch.Tensor, found: Statistics, weighing: _Weighing, class_weight: torch.Tensor | None, spec: HeadSpec
) -> Slopes:
    mean, valid = spec.reduction == "mean", weighing.valid
    of_loss = (grad / weighing.normalizer if mean else grad).where(valid, 0)
    of_target = (1 - spec.label_smoothing) * of_loss * weighing.target
    smoothing = of_loss * (spec.label_smoothing / spec.classes)
    of_softmax = of_target + smoothing * weighing.all_classes
    if spec.z_loss:
        of_square = (grad / weighing.count if mean else grad).where(valid, 0)
        of_softmax = of_softmax + 2 * spec.z_loss * of_square * found.log_sum
    probability = (found.target_logit - found.log_sum).exp()
    at_target = (of_softmax * probability - of_target).where(valid, 0)
    if spec.label_smoothing:
        at_target = at_target - (smoothing if class_weight is None else smoothing * weighing.target)
    if spec.margin is not None:
        at_target = at_target * spec.margin.apply(found.own_target / spec.scale)[1]
    return Slopes(of_softmax, smoothing if spec.label_smoothing else None, at_target)


def _own(class_weight: torch.Tensor | None, weight: torch.Tensor, spec: HeadSpec) -> torch.Tensor | None:
    """This rank's part of the class weights."""
    return None if class_weight is None else class_weight.narrow(0, spec.start, len(weight))
