"""A linear layer and the cross entropy of its outputs, with the classes split over a group and never all at once.

However many classes there are, only a tile of their logits exists at a time: see
:mod:`tensorshard.loss.two_passes`. Forward exchanges a few numbers per sample and rank, and backward
sums the input's gradient over the ranks. Nothing else travels.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm.groups import Group
from tensorshard.comm.marks import get_layout
from tensorshard.comm.sharding import to_local
from tensorshard.common.never_compiled import never_compiled
from tensorshard.layers.arguments import full_size, parameter_group
from tensorshard.loss.formulas import CrossEntropySpec, Margin
from tensorshard.loss.loss_arguments import ClassShard, check_options, check_targets, check_tensors, find_class_shard
from tensorshard.loss.tiled_loss import Extras, head_loss
from tensorshard.loss.tiles import Precision, autocast_dtype
from tensorshard.loss.two_passes import HeadSpec, choose_keep


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
    softcap: float | None = None,
    use_token_scaling: bool = False,
    return_lse: bool = False,
    return_token_accuracy: bool = False,
    num_classes: int | None = None,
    group: Group | None = None,
    keep_logits: bool | None = None,
    margin: Margin | None = None,
    scale: float = 1.0,
    normalize: bool = False,
) -> Any:
    """``F.cross_entropy(F.linear(input, weight, bias), target)`` without its logits, the classes split over a group.

    It is exact: every class is in every softmax. Sums over the classes of a sample are in fp64; other sums are in fp32,
    or in fp64 for fp64 tensors. Under ``torch.autocast`` a GPU multiplies in autocast's type, the CPU in fp32. Under
    ``torch.compile`` this function is not compiled.

    Args:
        input: [*, D], the same on every rank of the group.
        weight: [C, D] as a DTensor that is split along 0, or this rank's rows of it.
        target: [*]: class numbers, counted over all ranks, the same on every rank.
        bias: [C], split as the weight.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``. Smoothing counts the classes of all ranks.
        class_weight: [C]: the weights of all classes, on every rank. They get no gradient.
        z_loss: this times the squared log-sum-exp is added for each target that is not ignored (Chowdhery et al. 2022);
            with "mean", its mean over these targets.
        softcap: the loss is that of softcap * tanh(logits / softcap) (Gemma 2, 2024); None: of the logits as they are.
            It cannot be combined with `margin`, nor with ``keep_logits=True``.
        use_token_scaling: whether each target's loss, z-loss included, is multiplied by the probability that the
            softmax gives the target, taken as a constant (dynamic fine-tuning: Wu et al. 2025). The number by which
            "mean" divides does not change.
        return_lse, return_token_accuracy: whether these are returned, too. The log-sum-exp is that of the logits in the
            loss; the accuracy is that without the margin.
        num_classes: C, if `weight` is this rank's rows. Without it, the ranks exchange how many rows they hold.
        group: the ranks that hold the classes; by default the weight's own, else the model-parallel group. A process
            that has not joined a process group holds all classes.
        keep_logits: True: forward keeps the exponentials of this rank's logits for backward, in bf16: 2 bytes a sample
            and class. Their rounding of 2^-9 is then in the gradients. False: backward computes the logits again. None:
            they are kept if that takes at most half of the bytes of this rank's weight: in bf16 if input or weight has
            16 bits, else without rounding. If all have one type, that holds for up to half as many samples as features.
        margin: ``ArcFace`` or ``CosFace``, for the target's logit; needs `normalize`.
        scale: multiplies the logits.
        normalize: whether the rows of input and weight are normalized to length 1, so that logits are `scale` times
            cosines.

    Returns:
        The loss, the same on every rank of the group; fp32, or fp64 for fp64 tensors. With any ``return_`` option a
        :class:`tensorshard.nn.CrossEntropyOutput`.

    Raises:
        IndexError: a target is outside the classes.
        ValueError: shapes, types or options do not fit.
        RuntimeError: there is a process group, but no model-parallel one, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> weight = torch.zeros(500, 16)  # this rank's rows of 1000
        >>> ts.nn.functional.parallel_linear_cross_entropy(torch.randn(8, 16), weight, torch.arange(8))
        tensor(6.9078)
    """
    class_shard = _class_shard_of(weight, num_classes, _group_of(weight, group))
    loss = CrossEntropySpec(
        class_shard.classes,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        softcap,
        use_token_scaling,
        return_lse,
        return_token_accuracy,
    )
    return tiled_loss(
        input,
        weight,
        target,
        bias,
        class_shard,
        loss,
        class_weight=class_weight,
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
    class_shard: ClassShard,
    loss: CrossEntropySpec,
    *,
    class_weight: torch.Tensor | None,
    keep_logits: bool | None,
    margin: Margin | None,
    scale: float,
    normalize: bool,
    extras: Extras,
) -> Any:
    """:func:`parallel_linear_cross_entropy`, with the `extras` that only the module uses."""
    local_weight, local_bias = to_local(weight), None if bias is None else to_local(bias)
    check_options(loss, keep_logits, margin, scale, normalize, bias is not None, extras.sample is not None)
    check_tensors(input, local_weight, local_bias, casts=extras.casts)
    check_targets(target, input.shape[:-1], f"an input {list(input.shape)}", loss, class_weight)
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("class_weight requires a gradient, which a head does not compute: give class_weight.detach()")
    spec = HeadSpec(
        loss,
        class_shard.start,
        class_shard.group,
        Precision.choose(input, autocast_dtype(input)),
        keep=choose_keep(keep_logits, input, local_weight, local_bias, extras.sample, loss.softcap),
        margin=margin,
        scale=scale,
        normalize=normalize,
    )
    value, lse, accuracy = head_loss(input, local_weight, target.reshape(-1), local_bias, class_weight, spec, extras)
    return loss.result(value, lse, accuracy, target.shape)


def _group_of(weight: torch.Tensor, group: Group | None) -> dist.ProcessGroup | None:
    """The ranks that hold the classes of `weight`; None where one process holds them all.

    Raises:
        ValueError: the weight is a DTensor that is not split along its classes.
        RuntimeError: there is a process group, but no model-parallel one, and none was given.
    """
    if not isinstance(weight, DTensor):
        split = get_layout(weight) is not None
        return parameter_group(weight, group, "weight") if split or dist.is_initialized() or group is not None else None
    if tuple(weight.placements) != (Shard(0),):
        raise ValueError(
            f"a weight {list(weight.shape)} with placements {weight.placements} was given: a head's classes are split "
            "along dimension 0 of a one-dimensional mesh, (Shard(dim=0),)"
        )
    return parameter_group(weight, group, "weight")


def _class_shard_of(weight: torch.Tensor, classes: int | None, group: dist.ProcessGroup | None) -> ClassShard:
    """This rank's part of the classes, given its rows of the weight.

    Raises:
        ValueError: the weight does not have this rank's number of rows, or all ranks' are not `classes`.
    """
    known = full_size(weight, 0)
    if known is not None and classes not in (None, known):
        raise ValueError(f"num_classes={classes} was given with a weight of {known} classes: leave it out")
    rows = to_local(weight).size(0)
    return find_class_shard(
        rows,
        classes if known is None else known,
        group,
        weight.device,
        f"a weight of {rows} rows was",
        "cut it with tensorshard.slice(weight, ranks, 0)",
    )
