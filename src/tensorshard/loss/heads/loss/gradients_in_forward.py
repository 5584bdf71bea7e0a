"""A head's loss with its gradients, which are computed in forward, some rows at a time.

Whatever is done with a scalar loss later only multiplies its gradients by a factor. So once the log-sum-exps of some
rows are known, the gradients are computed from their logits at once. No logits are computed twice, and only those of
some rows are ever kept. (Liger Kernel computes a fused linear cross entropy this way, a chunk of rows at a time. Here
the classes of a chunk are computed a tile at a time, too, so that softmax finds each tile in the cache.)
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import Function

from tensorshard.comm import primitives
from tensorshard.common.repetitions import repetitions
from tensorshard.loss.heads.loss.gradient_sinks import SummedGradients
from tensorshard.loss.heads.loss.head_spec import HEAD_LOSS, HeadSpec, without_autocast
from tensorshard.loss.heads.loss.two_passes import run_backward, run_forward
from tensorshard.loss.heads.tiles.tiles import Columns, Tiles
from tensorshard.loss.once_differentiable import once_differentiable
from tensorshard.loss.softmax_cross_entropy import (
    Statistics,
    TargetWeights,
    find_slopes,
    reduce_loss,
    weigh_targets,
)
from tensorshard.torch_private.dispatch import has_dispatch_mode

# The logits of some rows take about this many bytes; more if the weight itself takes several times as many.
_CPU_BYTES = 64 << 20
_DEVICE_BYTES = 512 << 20
_FEWEST = 64


def rows_at_once(classes: int, weight_bytes: int, device: torch.device) -> int:
    """How many rows' logits are held at a time."""
    size = max(_CPU_BYTES if device.type == "cpu" else _DEVICE_BYTES, weight_bytes // 4)
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
        own_weight = None if class_weight is None else class_weight.narrow(0, spec.start, len(weight))
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
            found, own = run_forward(tiles, columns, own_weight, spec, room)
            lse[rows], picked[rows] = found.lse, found.target_logit
            if smoothed is not None and found.weighted_sum is not None:
                smoothed[rows] = found.weighted_sum
            of_rows = TargetWeights(
                weights.valid[rows], weights.num_valid, weights.of_target[rows], weights.normalizer, weights.of_all
            )
            slopes = find_slopes(one, None, found, of_rows, spec.loss)
            sink.begin(tiles)
            run_backward(
                tiles,
                columns,
                own_weight,
                found.lse,
                own,
                slopes,
                sink if needed[1] or needed[2] else None,
                None if total is None else total[rows],
                spec,
            )
        self.loss = reduce_loss(Statistics(lse, picked, smoothed), weights, spec.loss).to(wide)
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
    """A scalar loss; see :mod:`tensorshard.loss.softmax_cross_entropy`."""

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
        return ctx.gradients.loss

    @staticmethod
    @once_differentiable(HEAD_LOSS)
    def backward(ctx: Any, *grads: Any) -> Any:
        spec: HeadSpec = ctx.spec
        input, weight, bias, targets, class_weight = ctx.saved_tensors
        found, ctx.gradients = ctx.gradients, None
        with without_autocast(input):
            if found is None:  # a second backward: the first one gave the gradients to autograd
                found = _Gradients((input, weight, bias), ctx.needs_input_grad[:3], targets, class_weight, spec)
            of_input, of_weight, of_bias = found.times(grads[0])
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
    return repetitions([slice(begin, min(begin + step, samples)) for begin in range(0, samples, step)])


def _is_one(factor: torch.Tensor) -> bool:
    """Whether `factor` is known to be 1. One on a GPU is not read, since that would wait for the GPU."""
    known = factor.device.type == "cpu" and type(factor) is torch.Tensor and not has_dispatch_mode()
    return known and factor.item() == 1.0
