"""The two passes over the classes, what they need to know, and where backward puts the gradients.

Forward computes the log-sum-exp of each sample, tile by tile (the online softmax of Milakov and Gimelshein 2018).
Backward computes each tile's logits again, their softmax, and the tile's part of the gradients. The idea of computing a
head a tile at a time, with its logits computed twice, is that of Apple's cut cross entropy (Wijmans et al. 2024), which
has tiles along both dimensions. Here a tile has whole columns. So a rank can hold any of the classes, and a row of the
weight can be updated as soon as its gradient is known.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tensorshard.loss.formulas import CrossEntropySpec, Margin, Slopes, Statistics, combine, set_target_slopes, smooth
from tensorshard.loss.kernels import choose_kernels
from tensorshard.loss.tiles import Columns, Precision, Tile, Tiles, autocast_dtype


class Sink(Protocol):
    """Takes the gradients of each tile once."""

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        """Takes ``slope @ input`` as the gradient of the tile's rows; `slope` is [width, N]."""

    def buffer(self, tile: Tile) -> torch.Tensor:
        """[width, D] in the wide type: room for a gradient, which is then given to `put`."""

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        """Takes what `buffer` returned, with the gradient in it."""

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        """Takes the sum of `slope` [N, width] over the samples as the gradient of the tile's biases, if there are
        any."""


class BackwardOptimizer(Protocol):
    """Updates the weight during backward, in place of a gradient."""

    @property
    def group(self) -> dict[str, Any]:
        """Its options, and under "step" the number of its steps."""

    def check_unchanged(self, step: int) -> None:
        """Refuses the backward pass of a forward that ran at another step."""

    def begin(self, tiles: Tiles) -> Sink:
        """The sink that takes the gradients of a backward pass."""

    def end(self) -> None:
        """Called when the backward pass of the last `begin` is over."""


class Gradients:
    """Gradient tensors, for autograd.

    Args:
        weight, bias: whose gradients are needed, else None.
    """

    def __init__(self, tiles: Tiles, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        # Rows that are not in the sample have a gradient of zeros; without a sample every row is written.
        new = torch.empty_like if tiles.sample is None else torch.zeros_like
        self._tiles = tiles
        self.weight = None if weight is None else new(weight, memory_format=torch.contiguous_format)
        self.bias = None if bias is None else new(bias)
        self._direct = tiles.sample is None and weight is not None and weight.dtype == tiles.precision.wide
        self._scratch = None if self._direct or weight is None else tiles.new_scratch()

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.weight is not None:
            self.put(tile, self._tiles.multiply(slope, self._tiles.input, self.buffer(tile)))

    def buffer(self, tile: Tile) -> torch.Tensor:
        assert self.weight is not None
        return self.weight[tile.rows] if self._scratch is None else self._scratch[: tile.width]

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        if self.weight is not None and self._scratch is not None:
            self.weight[tile.rows] = grad.to(self.weight.dtype)

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias[tile.rows] = slope.sum(0).to(self.bias.dtype)


class SummedGradients:
    """Gradient tensors that are summed over several runs of rows, in the wide type.

    Args:
        weight, bias: whose gradients are needed, else None.
        dtype: the wide type.
    """

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = None if weight is None else weight.new_empty(weight.shape, dtype=dtype)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
        self._tiles: Tiles | None = None
        self._first = True

    def begin(self, tiles: Tiles) -> None:
        """Called before each run with its tiles."""
        self._first = self._tiles is None
        self._tiles = tiles

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.weight is None:
            return
        assert self._tiles is not None
        if self._first:
            self._tiles.multiply(slope, self._tiles.input, self.weight[tile.rows])
        else:
            self._tiles.add_product(self.weight[tile.rows], slope, self._tiles.input)

    def buffer(self, tile: Tile) -> torch.Tensor:
        assert self._tiles is not None
        return self._tiles.new_scratch()[: tile.width]

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        if self.weight is not None:
            self.weight[tile.rows] = grad if self._first else self.weight[tile.rows] + grad

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias[tile.rows] += slope.sum(0)


HEAD_LOSS = (
    "a cross entropy that computes its logits a tile at a time (a ParallelLinearCrossEntropy, or a Plan's logits; give "
    "logits='whole' to the Plan, or compute the logits with a linear layer and F.cross_entropy)"
)
"""What cannot be differentiated twice, in errors."""


@dataclass(frozen=True)
class HeadSpec:
    """The options of one head's loss.

    Args:
        loss: the options of the cross entropy.
        start: the first class of this rank.
        group: the ranks that hold the classes; None if one holds all.
        precision: the types of the computation.
        keep: the type in which exponentials of logits are kept between the passes; None: they are computed again.
        margin: applied to the target's logit.
        scale: a logit is this times a cosine.
        normalize: whether the rows of the weight are normalized to length 1.
        sum_input_grad: whether backward sums the input's gradient over the ranks; else the caller does.
        optimizer: updates the weight in backward, in place of a gradient.
        step: the number of the optimizer's steps when forward ran.
    """

    loss: CrossEntropySpec
    start: int
    group: dist.ProcessGroup | None
    precision: Precision
    keep: torch.dtype | None = None
    margin: Margin | None = None
    scale: float = 1.0
    normalize: bool = False
    sum_input_grad: bool = True
    optimizer: BackwardOptimizer | None = None
    step: int = 0


def choose_keep(
    keep_logits: bool | None,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sample: torch.Tensor | None,
    softcap: float | None,
) -> torch.dtype | None:
    """The type in which exponentials are kept for backward; None if they are not kept.

    Args:
        keep_logits: as the user gave it. True: in bf16. None: if they take at most half of the bytes of this rank's
            weight; in bf16 for 16-bit inputs, which are no more exact themselves, else in the input's type.
        softcap: with one, nothing is kept, since backward needs the logits and not only their exponentials.
    """
    if softcap is not None:
        return None
    if keep_logits is not None:
        return torch.bfloat16 if keep_logits else None
    narrow = (torch.bfloat16, torch.float16)
    if input.dtype in narrow or weight.dtype in narrow or autocast_dtype(input) in narrow:
        dtype = torch.bfloat16
    else:
        dtype = input.dtype
    columns = len(weight) if sample is None else len(sample)
    size = input.numel() // max(1, input.size(-1)) * columns * dtype.itemsize
    return dtype if 2 * size <= weight.numel() * weight.element_size() else None


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
        changed = (spec.margin.apply(own_target / spec.scale)[0] * spec.scale).where(columns.is_local, 0)
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
