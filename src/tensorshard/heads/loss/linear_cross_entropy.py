"""A linear layer and the cross entropy of its outputs, with the classes split over a group and never all at once.

However many classes there are, no more than a tile of their logits exists at a time: see
:mod:`tensorshard.heads.loss.two_passes`. One exchange of two or three numbers per sample and rank in forward, and the
sum of the input's gradient in backward, are all that travels.
"""

import torch

from tensorshard.comm.groups import Group
from tensorshard.comm.sharding import to_local
from tensorshard.heads.loss.argument_checks import check_head
from tensorshard.heads.loss.class_range import Place, find_place, head_group
from tensorshard.heads.loss.head_loss import Extras, head_loss
from tensorshard.heads.loss.head_spec import HeadSpec, autocast_dtype, choose_keep
from tensorshard.heads.loss.margins import Margin
from tensorshard.heads.tiles.precision import Precision
from tensorshard.transforms.compile import never_compiled


@never_compiled
def parallel_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_classes: int | None = None,
    group: Group | None = None,
    keep_logits: bool | None = None,
    margin: Margin | None = None,
    scale: float = 1.0,
    normalize: bool = False,
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(input, weight, bias), target)`` without its logits, the classes split over a group.

    Exact: every class is in every softmax. Sums are in fp32, or fp64 for fp64 tensors, those over the classes of a
    sample in fp64. Under ``torch.autocast`` a GPU multiplies in its type; the CPU in fp32. Under ``torch.compile`` it
    runs as it is, between two graphs.

    Args:
        input: [*, D], the same on every rank of the group.
        weight: [C, D], as a DTensor split along 0, or this rank's rows of it.
        target: [*]: classes, numbered over all ranks, the same on every rank.
        bias: [C], split as the weight.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``. Smoothing counts the classes of all ranks.
        class_weight: [C]: of all classes, on every rank. It gets no gradient.
        z_loss: this times the squared log-sum-exp is added per target that is not ignored (Chowdhery et al. 2022);
            with "mean", its mean over those.
        num_classes: C, where `weight` is this rank's rows; without it the ranks exchange what they hold.
        group: the ranks that hold the classes; by default the weight's own, else the model-parallel group. A process
            that has not joined a process group holds them all.
        keep_logits: whether backward finds this rank's logits (their exponentials, in bf16, whose rounding of 2^-9 is
            then in the gradients) as forward left them, 2 bytes a sample and class, or computes them again. None: they
            are kept, in bf16 for narrow inputs and without rounding for others, where that takes at most half of the
            bytes of this rank's weight: for as many samples as half the features, where all are of one type.
        margin: ``ArcFace`` or ``CosFace``, for the target's logit; needs `normalize`.
        scale: multiplies the logits.
        normalize: whether the rows of input and weight are taken at length 1, so that logits are `scale` times cosines.

    Returns:
        The loss, the same on every rank of the group; fp32, or fp64 for fp64 tensors.

    Raises:
        IndexError: a target outside the classes.
        ValueError: shapes, types or options that do not fit.
        RuntimeError: there is a process group, but no model-parallel one, and none was given.
    """
    return tiled_loss(
        input,
        weight,
        target,
        bias,
        find_place(weight, num_classes, head_group(weight, group)),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        class_weight=class_weight,
        z_loss=z_loss,
        reduction=reduction,
        keep_logits=keep_logits,
        margin=margin,
        scale=scale,
        normalize=normalize,
        extras=Extras(),
    )


@never_compiled
def tiled_loss(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    place: Place,
    *,
    ignore_index: int,
    label_smoothing: float,
    class_weight: torch.Tensor | None,
    z_loss: float,
    reduction: str,
    keep_logits: bool | None,
    margin: Margin | None,
    scale: float,
    normalize: bool,
    extras: Extras,
) -> torch.Tensor:
    """:func:`parallel_linear_cross_entropy` with what only the module asks for."""
    local_weight, local_bias = to_local(weight), None if bias is None else to_local(bias)
    check_head(
        input,
        local_weight,
        target,
        local_bias,
        classes=place.classes,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        margin=margin,
        scale=scale,
        normalize=normalize,
        extras=extras,
    )
    precision = Precision.choose(input, autocast_dtype(input))
    spec = HeadSpec(
        place.start,
        place.classes,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        place.group,
        precision,
        keep=choose_keep(keep_logits, input, local_weight, local_bias, extras.sample),
        margin=margin,
        scale=scale,
        normalize=normalize,
    )
    loss = head_loss(input, local_weight, target.reshape(-1), local_bias, class_weight, spec, extras)
    return loss.view(target.shape) if reduction == "none" else loss
