"""What a loss finds out about its logits and targets: how the logits are split, and whether the targets fit them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from tensorshard.comm import primitives
from tensorshard.comm.sharding import shard_range
from tensorshard.layers.arguments import check_indices

# How many operations back from unmarked logits to look for the layer that split them.
_LOOK_BACK = 16


def place(input: torch.Tensor, dim: int, classes: int | None, group: dist.ProcessGroup) -> tuple[int, int]:
    """The first class of this rank, and the number of classes of all ranks.

    Args:
        input: split logits.
        dim: the dimension of their classes.
        classes: of all ranks; None if it is not known, and the ranks have to exchange what they hold.

    Raises:
        ValueError: this rank does not hold its part of `classes`.
    """
    if classes is None:
        widths = primitives.exchange_sizes(input.size(dim), group, input.device)
        return sum(widths[: group.rank()]), sum(widths)
    start, width = shard_range(classes, group.size(), group.rank())
    if input.size(dim) != width:
        hint = ": it seems to be whole; take the mark off with register_parallel_dim(x, None)"
        raise ValueError(
            f"logits {list(input.shape)} are marked as split along dimension {dim}, of whose {classes} "
            f"classes rank {group.rank()} of {group.size()} holds "
            f"{width}{hint if input.size(dim) == classes else ''}"
        )
    return start, classes


def refuse_lost_mark(input: torch.Tensor) -> None:
    """Refuses logits that are a shard without a mark: a column layer's output after a few operations.

    Raises:
        ValueError: they are such a shard.
    """
    node: Any = input.grad_fn
    for _ in range(_LOOK_BACK):
        if node is None:
            return
        if isinstance(node, BackwardCFunction):
            split = getattr(node, "split_features", ())
            if input.size(-1) in split or input.size(min(1, input.ndim - 1)) in split:
                break
            return  # such as a gather, after which they are whole
        before = [following for following, _ in node.next_functions if following and following.next_functions]
        node = before[0] if len(before) == 1 else None
    else:
        return
    raise ValueError(
        f"logits {list(input.shape)} come from a layer that splits its output features, but do not say so: "
        "a view, a cast or an arithmetic operation drops the mark. Put it back with "
        "tensorshard.register_parallel_dim(logits, -1), or gather them first"
    )


def check_targets(
    input: torch.Tensor,
    target: torch.Tensor,
    dim: int,
    classes: int,
    *,
    weight: torch.Tensor | None,
    ignore_index: int,
) -> None:
    """Refuses targets and class weights that do not fit logits with `classes` classes along `dim`.

    Raises:
        IndexError: a target is outside the classes.
        ValueError: a shape or type does not fit.
    """
    expected = [size for axis, size in enumerate(input.shape) if axis != dim]
    if target.is_floating_point():
        raise ValueError(
            f"targets of type {target.dtype} were given: class probabilities need whole logits and "
            "no options but those of F.cross_entropy; else give class numbers"
        )
    if list(target.shape) != expected:
        raise ValueError(
            f"targets {list(target.shape)} were given for logits {list(input.shape)}, whose classes are "
            f"along dimension {dim}: expected {expected}"
        )
    if weight is not None and list(weight.shape) != [classes]:
        raise ValueError(f"weight {list(weight.shape)} was given for {classes} classes: expected [{classes}]")
    check_indices(target, classes, "target", "classes", ignore_index)
