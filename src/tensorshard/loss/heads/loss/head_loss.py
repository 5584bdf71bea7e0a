"""The head's loss as one operation of autograd."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from tensorshard.comm import primitives
from tensorshard.loss.heads.loss.gradient_sinks import Gradients
from tensorshard.loss.heads.loss.head_spec import HEAD_LOSS, HeadSpec, without_autocast
from tensorshard.loss.heads.loss.two_passes import OwnLogits, run_backward, run_forward
from tensorshard.loss.heads.tiles.tiles import Columns, Tiles
from tensorshard.loss.heads.update.head_sgd import HeadSGD
from tensorshard.loss.once_differentiable import once_differentiable
from tensorshard.loss.softmax_cross_entropy import Statistics, find_slopes, reduce_loss, token_accuracy, weigh_targets


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
    optimizer: HeadSGD | None = None
    sum_input_grad: bool = True
    casts: bool = False


class _Head(Function):
    """The loss and the optional outputs: see :mod:`tensorshard.loss.softmax_cross_entropy`."""

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
            found, own = run_forward(tiles, columns, _own(class_weight, weight, spec), spec)
            weights = weigh_targets(targets, class_weight, options, torch.float64)
            loss = reduce_loss(found, weights, options)
            accuracy = token_accuracy(found, weights, options)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        # Saved tensors must not share memory with the result, or they would keep it alive. All are made here.
        ctx.save_for_backward(
            input, weight, bias, targets, class_weight, sample, norms, found.lse, found.target_logit, *own
        )
        if accuracy is not None:
            ctx.mark_non_differentiable(accuracy)
        lse = found.lse.to(precision.wide, copy=True) if options.return_lse else None
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
            own_weight = _own(class_weight, weight, spec)
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


def _own(class_weight: torch.Tensor | None, weight: torch.Tensor, spec: HeadSpec) -> torch.Tensor | None:
    """This rank's part of the class weights."""
    return None if class_weight is None else class_weight.narrow(0, spec.start, len(weight))
