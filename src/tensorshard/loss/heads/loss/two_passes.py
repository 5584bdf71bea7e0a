"""The two passes over the classes.

Forward computes the log-sum-exp of each sample, tile by tile (the online softmax of Milakov and Gimelshein 2018).
    Backward computes each tile's logits again, their softmax, and the tile's part of the gradients. The idea of
    computing a head a tile at a time, with its logits computed twice, is that of Apple's cut cross entropy (Wijmans et
    al. 2024), which has tiles along both dimensions. Here a tile has whole columns. So a rank can hold any of the
    classes, and a row of the weight can be updated as soon as its gradient is known.
"""

from typing import NamedTuple

import torch

from tensorshard.loss.heads.loss.gradient_sinks import Sink
from tensorshard.loss.heads.loss.head_spec import HeadSpec
from tensorshard.loss.heads.tiles.kernels import choose_kernels
from tensorshard.loss.heads.tiles.tiles import Columns, Tiles
from tensorshard.loss.softmax_cross_entropy import Slopes, Statistics, combine, set_target_slopes, smooth


class OwnLogits(NamedTuple):
    """What backward needs of this rank's logits.

    Args:
        own_target: [N] fp64: the target logits before the margin, 0 if another rank holds the target.
        reference: [N]: the largest logit of this rank.
        kept: exponentials of this rank's logits, tile after tile; with a softcap, the capped logits themselves; or
            None.
        references: [tiles, N]: the numbers that were subtracted from the logits of each tile before the exponential.
    """

    own_target: torch.Tensor
    reference: torch.Tensor
    kept: torch.Tensor | None
    references: torch.Tensor | None


def run_forward(
    tiles: Tiles,
    columns: Columns,
    class_weight: torch.Tensor | None,
    spec: HeadSpec,
    room: torch.Tensor | None = None,
) -> tuple[Statistics, OwnLogits]:
    """One pass over this rank's classes, and one exchange of a few numbers per sample and rank.

    Args:
        class_weight: [V] of this rank, in the wide type, or None.
        room: at least N * V elements of the type ``spec.keep``, for what is kept; None: it is allocated here.

    Returns:
        The statistics of the classes of all ranks in fp64, with target logits after the margin; and this rank's logits.
    """
    samples, wide = len(tiles.input), spec.precision.wide
    zeros = tiles.input.new_zeros((4, samples), dtype=torch.float64)
    total, own_target, weighted_sum, hit = zeros.unbind()
    reference = tiles.input.new_full((samples,), -torch.inf, dtype=wide)
    largest = reference.clone() if spec.loss.return_token_accuracy else None
    kept = references = None
    softcap = spec.loss.softcap
    if spec.keep is not None:
        size = samples * tiles.columns
        kept = tiles.input.new_empty(size, dtype=spec.keep) if room is None else room[:size]
        references = None if softcap is not None else tiles.input.new_empty((len(tiles), samples), dtype=wide)
    # Exponentials that are kept in the type of their computation are computed where they stay.
    stays = kept is not None and softcap is None and spec.keep == wide

    kernels = choose_kernels(tiles.input)
    for tile in tiles:
        weight = tiles.weight(tile)
        tiles.note_norms(tile, weight)
        own_kept = None if kept is None else kept[samples * tile.begin : samples * tile.end].view(samples, tile.width)
        logits = tiles.logits(tile, weight, own_kept if stays else None)
        if softcap is not None:
            logits = kernels.cap(logits, softcap)
        column, inside = columns.inside(tile)
        if largest is not None:  # before the margin, which predictions do not have
            values, first = logits.max(1, keepdim=True)
            larger = values[:, 0] > largest
            hit = torch.where(larger, ((first == column) & inside)[:, 0].double(), hit)
            largest = torch.where(larger, values[:, 0], largest)
        picked = logits.gather(1, column).double()
        own_target += picked.where(inside, 0)[:, 0]
        if spec.margin is not None:
            picked = picked.where(~inside, spec.margin.apply(picked / spec.scale)[0] * spec.scale)
            logits.scatter_(1, column, picked.to(wide))
        if spec.loss.label_smoothing:
            weighted_sum += logits.sum(1) if class_weight is None else logits.mv(class_weight[tile.rows])
        if own_kept is not None and softcap is not None:
            own_kept.copy_(logits)
        reference = kernels.online_softmax(logits, reference, total)
        if references is not None:
            references[tile.index] = reference
            if own_kept is not None and not stays:
                own_kept.copy_(logits)

    changed = own_target
    if spec.margin is not None:
        changed = (spec.margin.apply(own_target / spec.scale)[0] * spec.scale).where(columns.here, 0)
    own = Statistics(
        reference + total.log(),
        changed,
        weighted_sum if spec.loss.label_smoothing else None,
        None if largest is None else largest.double(),
        None if largest is None else hit,
    )
    return combine(own, spec.group), OwnLogits(own_target, reference, kept, references)


def run_backward(
    tiles: Tiles,
    columns: Columns,
    class_weight: torch.Tensor | None,
    lse: torch.Tensor,
    own: OwnLogits,
    slopes: Slopes,
    sink: Sink | None,
    input_grad: torch.Tensor | None,
    spec: HeadSpec,
) -> None:
    """One pass over this rank's classes.

    Args:
        lse: [N] fp64: of the classes of all ranks.
        slopes: [N] fp64.
        sink: takes the gradients of the weight and the bias; None if they are not needed.
        input_grad: [N, D] zeros in the wide type, to which this rank's part is added; or None.
    """
    wide, softcap = spec.precision.wide, spec.loss.softcap
    scratch = tiles.new_scratch() if spec.normalize and sink is not None else None
    of_softmax = (slopes.of_softmax * (own.reference.double() - lse).exp()).to(wide)[:, None]
    smoothing = None if slopes.smoothing is None else slopes.smoothing.to(wide)
    at_target = slopes.at_target
    if spec.margin is not None:
        at_target = at_target * spec.margin.apply(own.own_target / spec.scale)[1]
    at_target = at_target.to(wide)[:, None]
    room_of_cap = None if softcap is None else tiles.new_buffer()
    samples, kernels = len(tiles.input), choose_kernels(tiles.input)
    for tile in tiles:
        weight = tiles.weight(tile)
        weights = None if class_weight is None else class_weight[tile.rows]
        capped = None if room_of_cap is None else tiles.as_tile(room_of_cap, tile)  # slopes of the cap
        kept = None
        if own.kept is not None:
            kept = own.kept[samples * tile.begin : samples * tile.end].view(samples, tile.width)
        if kept is None or own.references is None:
            logits = tiles.logits(tile, weight) if kept is None else tiles.buffer(tile).copy_(kept)
            if softcap is not None and capped is not None:
                logits = logits if kept is not None else kernels.cap(logits, softcap)
                kernels.cap_slope(logits, softcap, capped)
            slope = kernels.softmax_slope(logits, own.reference, of_softmax, smoothing, weights)
        else:
            factor = slopes.of_softmax * (own.references[tile.index].double() - lse).exp()
            slope = smooth(torch.mul(kept, factor.to(wide)[:, None], out=tiles.buffer(tile)), smoothing, weights)
        column, inside = columns.inside(tile)
        set_target_slopes(slope, column, inside, at_target)
        if capped is not None:
            slope.mul_(capped)

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
        # The row is normalized, so the gradient along the row itself has no effect: that part is removed.
        grad = tiles.multiply(slope.t(), tiles.input, sink.buffer(tile))
        room = scratch[: tile.width]
        along = torch.mul(grad, weight, out=room).sum(1).mul_(inverse_norms.square())
        sink.put(tile, grad.sub_(torch.mul(weight, along[:, None], out=room)))
