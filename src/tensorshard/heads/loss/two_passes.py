"""The two passes over the classes.

Forward: the log-sum-exp of each sample, kept up to date from tile to tile (the online softmax of Milakov and
Gimelshein 2018). Backward: each tile's logits again, their softmax, and what it adds to the gradients. Computing
a head a tile at a time, with its logits computed twice, is the idea of Apple's cut cross entropy (Wijmans et al.
2024), there along both dimensions. Here tiles are of whole columns, which is what lets a rank hold any of the
classes and lets a row of the weight be updated as soon as its gradient is known.
"""

from typing import NamedTuple

import torch

from tensorshard.comm import primitives
from tensorshard.heads.loss.gradient_sinks import Sink
from tensorshard.heads.loss.head_spec import HeadSpec
from tensorshard.heads.tiles.kernels import choose_kernels, smooth
from tensorshard.heads.tiles.tiles import Columns, Tiles


class Statistics(NamedTuple):
    """What forward finds out about each sample, over the classes of all ranks but where it says otherwise.

    Args:
        log_sum: [N] fp64: log-sum-exp of the logits.
        target_logit: [N] fp64, after the margin; 0 for ignored samples.
        weighted_sum: [N] fp64: of the logits, by the class weights; 0 without label smoothing.
        own_target: [N] fp64: this rank's target logits before the margin, 0 where they are elsewhere.
        reference: [N]: the largest logit of this rank.
        kept: exponentials of this rank's logits, tile after tile, or None.
        references: [tiles, N]: what was subtracted from the logits of each tile in `kept`.
    """

    log_sum: torch.Tensor
    target_logit: torch.Tensor
    weighted_sum: torch.Tensor
    own_target: torch.Tensor
    reference: torch.Tensor
    kept: torch.Tensor | None
    references: torch.Tensor | None


def run_forward(tiles: Tiles, columns: Columns, class_weight: torch.Tensor | None, spec: HeadSpec) -> Statistics:
    """One pass over this rank's classes, and one exchange of two or three numbers per sample and rank.

    Args:
        class_weight: [V] of this rank, in the wide type, or None.
    """
    samples, wide = len(tiles.input), spec.precision.wide
    zeros = tiles.input.new_zeros((3, samples), dtype=torch.float64)
    total, own_target, weighted_sum = zeros.unbind()
    reference = tiles.input.new_full((samples,), -torch.inf, dtype=wide)
    kept = references = None
    if spec.keep is not None:
        kept = tiles.input.new_empty(samples * tiles.columns, dtype=spec.keep)
        references = tiles.input.new_empty((len(tiles), samples), dtype=wide)

    kernels = choose_kernels(tiles.input)
    for tile in tiles:
        weight = tiles.weight(tile)
        tiles.note_norms(tile, weight)
        logits = tiles.logits(tile, weight)
        column, inside = columns.inside(tile)
        picked = logits.gather(1, column).double()
        own_target += picked.where(inside, 0)[:, 0]
        if spec.margin is not None:
            picked = picked.where(~inside, spec.margin.apply(picked / spec.scale)[0] * spec.scale)
            logits.scatter_(1, column, picked.to(wide))
        if spec.label_smoothing:
            weighted_sum += logits.sum(1) if class_weight is None else logits.mv(class_weight[tile.rows])
        reference = kernels.online_softmax(logits, reference, total)
        if kept is not None and references is not None:
            kept[samples * tile.begin : samples * tile.end].view(logits.shape).copy_(logits)
            references[tile.index] = reference

    changed = own_target
    if spec.margin is not None:
        changed = (spec.margin.apply(own_target / spec.scale)[0] * spec.scale).where(columns.here, 0)
    parts = torch.stack([reference + total.log(), changed, weighted_sum][: 3 if spec.label_smoothing else 2])[None]
    if spec.group is not None:
        parts = primitives.gather_flat(parts[0], spec.group)
    sums = parts[:, 1:].sum(0)
    weighted_sum = sums[1] if spec.label_smoothing else weighted_sum
    return Statistics(parts[:, 0].logsumexp(0), sums[0], weighted_sum, own_target, reference, kept, references)


class Slopes(NamedTuple):
    """How the loss of each sample changes with its logits z: of_softmax * softmax(z) - smoothing * class weight,
    and at the target `at_target`. All [N], fp64.
    """

    of_softmax: torch.Tensor
    smoothing: torch.Tensor | None
    at_target: torch.Tensor


def run_backward(
    tiles: Tiles,
    columns: Columns,
    class_weight: torch.Tensor | None,
    found: Statistics,
    slopes: Slopes,
    sink: Sink | None,
    input_grad: torch.Tensor | None,
    spec: HeadSpec,
) -> None:
    """One pass over this rank's classes.

    Args:
        sink: takes the gradients of the weight and the bias; None if they are not needed.
        input_grad: [N, D] zeros in the wide type, to which this rank's part is added; or None.
    """
    wide = spec.precision.wide
    scratch = tiles.new_scratch() if spec.normalize and sink is not None else None
    of_softmax = (slopes.of_softmax * (found.reference.double() - found.log_sum).exp()).to(wide)[:, None]
    smoothing = None if slopes.smoothing is None else slopes.smoothing.to(wide)
    at_target = slopes.at_target.to(wide)[:, None]
    samples, kernels = len(tiles.input), choose_kernels(tiles.input)
    for tile in tiles:
        weight = tiles.weight(tile)
        weights = None if class_weight is None else class_weight[tile.rows]
        if found.kept is None or found.references is None:
            logits = tiles.logits(tile, weight)
            slope = kernels.softmax_slope(logits, found.reference, of_softmax, smoothing, weights)
        else:
            kept = found.kept[samples * tile.begin : samples * tile.end].view(samples, tile.width)
            factor = slopes.of_softmax * (found.references[tile.index].double() - found.log_sum).exp()
            slope = smooth(torch.mul(kept, factor.to(wide)[:, None], out=tiles.buffer(tile)), smoothing, weights)
        column, inside = columns.inside(tile)
        slope.scatter_(1, column, at_target.where(inside, slope.gather(1, column)))

        if sink is not None:
            sink.put_bias(tile, slope)
        inverse_norms = tiles.inverse_norms(tile)
        if inverse_norms is not None:
            slope.mul_(inverse_norms)
        slope = tiles.narrowed(slope)
        if input_grad is not None:
            tiles.add_product(input_grad, slope, weight)
        if sink is None:
            continue
        if inverse_norms is None or scratch is None:
            sink.put_product(tile, slope.t())
            continue
        # Along a row's own direction its length changes, not what is taken of it: that part of the gradient goes.
        grad = tiles.multiply(slope.t(), tiles.input, sink.buffer(tile))
        room = scratch[: tile.width]
        along = torch.mul(grad, weight, out=room).sum(1).mul_(inverse_norms.square())
        sink.put(tile, grad.sub_(torch.mul(weight, along[:, None], out=room)))
