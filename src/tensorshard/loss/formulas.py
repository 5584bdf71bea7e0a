"""The formulas of the softmax cross entropy, whose classes may be split over a group.

For a token of logits z and target t, with C classes over all ranks and class weights w:

    lse  = log sum_j exp(z_j)
    loss = (1 - label_smoothing) w_t (lse - z_t) + label_smoothing / C sum_j w_j (lse - z_j) + z_loss lse^2

Each rank reduces its own classes to a few numbers a token. One exchange of these gives every rank the numbers of all
classes (the idea of Megatron-LM's vocabulary-parallel cross entropy, with one exchange in place of three). Loss and
gradient follow from them without further communication. The formulas are the same where all logits are held
(:mod:`split_cross_entropy`) and where they are made a tile at a time (:mod:`tensorshard.loss.two_passes`).

Also here: margins for recognition: the target's cosine is made smaller, so that training has to make it larger.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import primitives

REDUCTIONS = ("none", "mean", "sum")
# Cosines nearer to 1 than this are taken as this far: the angle's derivative is infinite at 1 itself.
_EDGE = 1e-7


class CrossEntropyOutput(NamedTuple):
    """A loss with what its ``return_`` options asked for.

    Attributes:
        loss: a scalar; with ``reduction="none"`` of the targets' shape.
        lse: with ``return_lse``, of the targets' shape: the log-sum-exp of each token's logits, also of ignored tokens.
            It is differentiable, for a z-loss of your own.
        token_accuracy: with ``return_token_accuracy``, a scalar: the share of targets whose class has the largest
            logit. Of equal logits, that of the lowest class counts as the largest. Ignored targets do not count; if all
            are ignored, it is nan. With ``reduction="none"`` it is of the targets' shape: 1 or 0, and 0 where ignored.

    Examples:
        >>> logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
        >>> cross_entropy = ts.nn.functional.parallel_cross_entropy
        >>> output = cross_entropy(logits, torch.tensor([0, 1]), return_token_accuracy=True)
        >>> output.token_accuracy
        tensor(0.5000)
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None


@dataclass(frozen=True)
class CrossEntropySpec:
    """The options of one loss.

    Args:
        classes: of all ranks.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.
        z_loss: this times the squared log-sum-exp is added (Chowdhery et al. 2022).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, 2024); None: they are taken as they are.
        use_token_scaling: whether a token's loss is multiplied by its target's probability, taken as a constant
            (dynamic fine-tuning: Wu et al. 2025).
        return_lse, return_token_accuracy: what is returned beside the loss.

    Raises:
        ValueError: a value is out of its range.
    """

    classes: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    use_token_scaling: bool = False
    return_lse: bool = False
    return_token_accuracy: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r} was given: use 'none', 'mean' or 'sum'")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} was given: use a number from 0 to 1")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} was given: use 0 or more")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap} was given: use a number above 0, or None for no cap")

    @classmethod
    def of(cls, module: nn.Module, classes: int) -> "CrossEntropySpec":
        """The options that `module` has as attributes now."""
        return cls(classes, **{option.name: getattr(module, option.name) for option in fields(cls)[1:]})

    def result(
        self, loss: torch.Tensor, lse: torch.Tensor | None, accuracy: torch.Tensor | None, shape: torch.Size
    ) -> Any:
        """What the user gets, for targets of `shape`: the loss alone where nothing else was asked for."""
        unreduced = self.reduction == "none"
        loss = loss.view(shape) if unreduced else loss
        if not (self.return_lse or self.return_token_accuracy):
            return loss
        if accuracy is not None and unreduced:
            accuracy = accuracy.view(shape)
        return CrossEntropyOutput(loss, None if lse is None else lse.view(shape), accuracy)


# -- statistics: a few numbers a token --


class Statistics(NamedTuple):
    """A few numbers for each token, over the classes of one rank or of all.

    Args:
        lse: [N]: log-sum-exp of the logits.
        target_logit: [N]: the target's logit; 0 where the target is ignored or held by another rank.
        weighted_sum: [N]: the sum of class weights times logits; None without label smoothing.
        largest: [N]: the largest logit; None without token accuracy.
        hit: [N]: 1 where the first class with that logit is the target, else 0; None without token accuracy.
    """

    lse: torch.Tensor
    target_logit: torch.Tensor
    weighted_sum: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    hit: torch.Tensor | None = None


def combine(own: Statistics, group: dist.ProcessGroup | None) -> Statistics:
    """The statistics of all classes, from this rank's. One exchange of 2 to 5 numbers a token.

    Args:
        group: the ranks that hold the classes; None if this one holds all.
    """
    if group is None or group.size() == 1:
        return own
    names = [name for name in Statistics.__annotations__ if getattr(own, name) is not None]
    gathered = primitives.gather_flat(torch.stack([getattr(own, name) for name in names]), group)
    parts = dict(zip(names, gathered.unbind(1), strict=True))  # each [ranks, N]
    largest = hit = None
    if "largest" in parts:
        largest, rank = parts["largest"].max(0)  # of equal logits that of the first rank, which has the lowest classes
        hit = parts["hit"].gather(0, rank[None])[0]
    weighted_sum = parts["weighted_sum"].sum(0) if "weighted_sum" in parts else None
    return Statistics(parts["lse"].logsumexp(0), parts["target_logit"].sum(0), weighted_sum, largest, hit)


def local_columns(
    targets: torch.Tensor, ignore_index: int, start: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N]: the column of each target among the classes [start, start + width), or 0; and whether it is among them."""
    columns = targets - start
    is_local = (columns >= 0) & (columns < width) & (targets != ignore_index)
    return columns.where(is_local, 0), is_local


# -- the loss --


class TargetWeights(NamedTuple):
    """How much each target counts.

    Args:
        valid: [N]: which targets are not ignored.
        num_valid: how many these are.
        of_target: [N]: the class weight of each target, 0 if it is ignored.
        normalizer: the sum of `of_target`, by which "mean" divides.
        of_all: the sum of all class weights.
    """

    valid: torch.Tensor
    num_valid: torch.Tensor
    of_target: torch.Tensor
    normalizer: torch.Tensor
    of_all: torch.Tensor | float


def weigh_targets(
    targets: torch.Tensor, class_weight: torch.Tensor | None, spec: CrossEntropySpec, dtype: torch.dtype
) -> TargetWeights:
    """The weights of targets [N], given the weights [C] of all classes. Sums are taken in `dtype`."""
    valid = targets != spec.ignore_index
    if class_weight is None:
        of_target = valid.to(dtype)
        return TargetWeights(valid, valid.sum(), of_target, of_target.sum(), float(spec.classes))
    class_weight = class_weight.to(dtype)
    of_target = class_weight[targets.where(valid, 0)] * valid
    return TargetWeights(valid, valid.sum(), of_target, of_target.sum(), class_weight.sum())


def reduce_loss(statistics: Statistics, weights: TargetWeights, spec: CrossEntropySpec) -> torch.Tensor:
    """The loss, from the statistics of all classes: [N] or a scalar, as ``spec.reduction`` says."""
    losses = (
        (1 - spec.label_smoothing)
        * weights.of_target
        * (statistics.lse - statistics.target_logit).where(weights.valid, 0)
    )
    if statistics.weighted_sum is not None:
        smooth = weights.of_all * statistics.lse - statistics.weighted_sum
        losses = losses + (spec.label_smoothing / spec.classes) * smooth.where(weights.valid, 0)
    squares = (spec.z_loss * statistics.lse.square()).where(weights.valid, 0) if spec.z_loss else None
    if spec.use_token_scaling:
        probability = _target_probability(statistics, weights)
        losses, squares = losses * probability, None if squares is None else squares * probability
    if spec.reduction == "none":
        return losses if squares is None else losses + squares
    total = losses.sum()
    if spec.reduction == "sum":
        return total if squares is None else total + squares.sum()
    mean = total / weights.normalizer
    return mean if squares is None else mean + squares.sum() / weights.num_valid


def token_accuracy(statistics: Statistics, weights: TargetWeights, spec: CrossEntropySpec) -> torch.Tensor | None:
    """The accuracy of a :class:`CrossEntropyOutput`, in fp32; None where it was not asked for."""
    if statistics.hit is None:
        return None
    hits = ((statistics.hit > 0) & weights.valid).float()
    return hits if spec.reduction == "none" else hits.sum() / weights.num_valid


def _target_probability(statistics: Statistics, weights: TargetWeights) -> torch.Tensor:
    """[N]: the softmax's probability of each target; 0 for ignored ones."""
    return (statistics.target_logit - statistics.lse).detach().exp().where(weights.valid, 0)


# -- its gradient --


class Slopes(NamedTuple):
    """The derivative of the loss with respect to a token's logits z: `at_target` at the target, and at the other
    classes of_softmax * softmax(z) - smoothing * class weight. All are [N].
    """

    of_softmax: torch.Tensor
    smoothing: torch.Tensor | None
    at_target: torch.Tensor


def find_slopes(
    grad: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    statistics: Statistics,
    weights: TargetWeights,
    spec: CrossEntropySpec,
) -> Slopes:
    """The slopes, from the gradients that arrive for the loss and for the log-sum-exps [N].

    The slope at the target is a small difference of two large terms. It is one number a token, so it is computed here,
    where `statistics` may be of a wider type than the logits.
    """
    dtype, mean = statistics.lse.dtype, spec.reduction == "mean"
    grad = statistics.lse.new_zeros(()) if grad is None else grad.to(dtype)
    of_loss = (grad / weights.normalizer if mean else grad).where(weights.valid, 0)
    probability = _target_probability(statistics, weights)
    if spec.use_token_scaling:
        of_loss = of_loss * probability
    of_target = (1 - spec.label_smoothing) * of_loss * weights.of_target
    smoothing = of_loss * (spec.label_smoothing / spec.classes) if spec.label_smoothing else None
    of_softmax = of_target if smoothing is None else of_target + smoothing * weights.of_all
    if spec.z_loss:
        of_square = (grad / weights.num_valid if mean else grad).where(weights.valid, 0)
        if spec.use_token_scaling:
            of_square = of_square * probability
        of_softmax = of_softmax + 2 * spec.z_loss * of_square * statistics.lse
    if grad_lse is not None:
        of_softmax = of_softmax + grad_lse.to(dtype)
    at_target = of_softmax * probability - of_target
    if smoothing is not None:
        at_target = at_target - smoothing * weights.of_target
    return Slopes(of_softmax, smoothing, at_target)


# -- what is done to a tile of logits --


def softmax_slope(
    logits: torch.Tensor,
    reference: torch.Tensor,
    of_softmax: torch.Tensor,
    smoothing: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss's gradient with respect to a tile of logits, except at the targets.

    Args:
        logits: [N, width].
        reference: [N]: the log-sum-exp; or another number, for which `of_softmax` [N, 1] makes up.
        smoothing: [N]: what label smoothing subtracts, times the class weights [width] if there are any.
        out: where the gradient is written; None: over the logits.
    """
    slope = logits.sub_(reference[:, None]) if out is None else torch.sub(logits, reference[:, None], out=out)
    return smooth(slope.exp_().mul_(of_softmax), smoothing, class_weight)


def smooth(slope: torch.Tensor, smoothing: torch.Tensor | None, class_weight: torch.Tensor | None) -> torch.Tensor:
    """Subtracts the share of label smoothing from a tile's slopes, in place."""
    if smoothing is None:
        return slope
    return slope.sub_(smoothing[:, None]) if class_weight is None else slope.addr_(smoothing, class_weight, alpha=-1)


def set_target_slopes(slope: torch.Tensor, column: torch.Tensor, inside: torch.Tensor, at_target: torch.Tensor) -> None:
    """Writes the targets' slopes into a tile's, in place.

    Args:
        column: [N, 1]: the target's column in the tile; any column where the target is not `inside` [N, 1].
        at_target: [N, 1].
    """
    slope.scatter_(1, column, at_target.where(inside, slope.gather(1, column)))


def cap(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(logits / softcap), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap)


def cap_slope(capped: torch.Tensor, softcap: float, out: torch.Tensor) -> torch.Tensor:
    """The derivative of capped logits with respect to the logits: 1 - (capped / softcap)^2, written to `out`."""
    return torch.div(capped, softcap, out=out).square_().neg_().add_(1)


@dataclass(frozen=True)
class ArcFace:
    """An additive angular margin (Deng et al. 2019): cos(a) becomes cos(a + margin).

    If a + margin exceeds pi, cos(a + margin) would grow again. Then it is cos(a) - margin * sin(margin), as in
    InsightFace.

    Args:
        margin: in radians.

    Raises:
        ValueError: `margin` is outside [0, pi).

    Examples:
        >>> head = ts.nn.ParallelLinearCrossEntropy(16, 1000, margin=ts.nn.ArcFace(0.5))
        >>> head(torch.randn(8, 16), torch.arange(8)).shape
        torch.Size([])
    """

    margin: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.pi:
            raise ValueError(f"ArcFace was given margin={self.margin}: use an angle from 0 to pi, in radians")

    def apply(self, cosine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosine with its margin, and the derivative of that; both of the shape of `cosine`."""
        clamped = cosine.clamp(-1 + _EDGE, 1 - _EDGE)
        angle = clamped.acos()
        turned = angle + self.margin
        monotone = turned <= math.pi
        value = torch.where(monotone, turned.cos(), cosine - self.margin * math.sin(self.margin))
        return value, torch.where(monotone, turned.sin() / angle.sin(), 1.0)


@dataclass(frozen=True)
class CosFace:
    """An additive cosine margin (Wang et al. 2018): cos(a) becomes cos(a) - margin.

    Args:
        margin: what is subtracted.

    Raises:
        ValueError: `margin` is outside [0, 2).

    Examples:
        >>> head = ts.nn.ParallelLinearCrossEntropy(16, 1000, margin=ts.nn.CosFace(0.35))
        >>> head(torch.randn(8, 16), torch.arange(8)).shape
        torch.Size([])
    """

    margin: float = 0.35

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 2:
            raise ValueError(f"CosFace was given margin={self.margin}: use a number from 0 to 2, the range of a cosine")

    def apply(self, cosine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosine with its margin, and the derivative of that; both of the shape of `cosine`."""
        return cosine - self.margin, torch.ones_like(cosine)


Margin = ArcFace | CosFace
