"""What the losses are given: which classes this rank holds, targets, and options, all checked before anything else."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from tensorshard.comm import primitives
from tensorshard.comm.sharding import shard_range
from tensorshard.layers.arguments import check_indices
from tensorshard.loss.formulas import CrossEntropySpec, Margin
from tensorshard.loss.tiles import autocast_dtype

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# How many operations back from unmarked logits to look for the layer that split them.
_LOOK_BACK = 16


@dataclass(frozen=True)
class ClassShard:
    """This rank's part of the classes.

    Args:
        start: its first class.
        classes: of all ranks.
        group: the ranks that hold them; None if one holds all.
    """

    start: int
    classes: int
    group: dist.ProcessGroup | None


def find_class_shard(
    rows: int, classes: int | None, group: dist.ProcessGroup | None, device: torch.device, given: str, remedy: str
) -> ClassShard:
    """This rank's part of the classes, of which it has `rows`.

    Args:
        classes: of all ranks; None if it is not known, and the ranks exchange how many they hold.
        given: what has these rows, for messages.
        remedy: what to do if it has all classes and should have a part of them.

    Raises:
        ValueError: this rank does not hold its part of `classes`.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if classes is None and group is not None and size > 1:
        widths = primitives.exchange_sizes(rows, group, device)
        return ClassShard(sum(widths[:rank]), sum(widths), group)
    classes = rows if classes is None else classes
    start, width = shard_range(classes, size, rank)
    if rows != width:
        raise ValueError(
            f"{given} given to rank {rank} of {size}, which holds {width} of {classes} classes"
            + (f": it seems to be whole; {remedy}" if rows == classes else "")
        )
    return ClassShard(start, classes, group)


def check_targets(
    target: torch.Tensor,
    shape: torch.Size,
    given: str,
    loss: CrossEntropySpec,
    class_weight: torch.Tensor | None = None,
    name: str = "class_weight",
) -> None:
    """Refuses targets and class weights that do not fit a loss.

    Args:
        shape: that the targets must have.
        given: what they belong to, for messages.
        name: of the argument `class_weight`.

    Raises:
        IndexError: a target is outside the classes.
        TypeError: the targets are no tensor.
        ValueError: a shape or type does not fit.
    """
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"targets are {target!r}: give class numbers, as a tensor of integers")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"targets of type {target.dtype} were given: give class numbers, as integers (class probabilities need "
            f"whole logits and no options but those of F.cross_entropy)"
        )
    if target.shape != shape:
        raise ValueError(f"targets {list(target.shape)} were given for {given}: expected {list(shape)}")
    if class_weight is not None and list(class_weight.shape) != [loss.classes]:
        raise ValueError(
            f"{name} {list(class_weight.shape)} was given for {loss.classes} classes: expected [{loss.classes}], all "
            f"classes on every rank"
        )
    check_indices(target, loss.classes, "target", "classes", loss.ignore_index)


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


def check_options(
    loss: CrossEntropySpec,
    keep_logits: bool | None,
    margin: Margin | None,
    scale: float,
    normalize: bool,
    bias: bool,
    samples_classes: bool,
) -> None:
    """Refuses options of a head that do not fit together.

    Raises:
        TypeError: `margin` is no margin.
        ValueError: they do not fit.
    """
    if margin is not None and not hasattr(margin, "apply"):
        raise TypeError(f"margin={margin!r} was given: use ts.nn.ArcFace(...), ts.nn.CosFace(...), or None")
    if loss.softcap is not None and margin is not None:
        raise ValueError(
            f"softcap={loss.softcap} was given with {margin}: a margin changes a cosine, and a cap bends what it did. "
            "Cosines are bounded without one: leave softcap out"
        )
    if loss.softcap is not None and keep_logits:
        raise ValueError(
            f"keep_logits=True was given with softcap={loss.softcap}: what is kept are exponentials, from which the "
            "slope of the cap cannot be told. Leave keep_logits out"
        )
    if not scale > 0:
        raise ValueError(f"scale={scale} was given: use a number above 0")
    if margin is not None and not normalize:
        raise ValueError(
            f"{margin} was given without normalize=True: a margin changes a cosine, so rows must have length 1"
        )
    if bias and normalize:
        what = f"{margin}" if margin is not None else "normalize=True"
        raise ValueError(
            f"a bias was given with {what}: logits are then cosines, to which nothing is added. Leave it out"
        )
    if samples_classes and loss.label_smoothing:
        raise ValueError(
            f"label_smoothing={loss.label_smoothing} was given with sample_rate: smoothing spreads over all classes, a "
            "sample leaves most of them out. Use one of the two"
        )
    if samples_classes and loss.return_token_accuracy:
        raise ValueError(
            "return_token_accuracy=True was given with sample_rate: the largest logit may be of a class that the "
            "sample leaves out. Use accuracy(), which computes all classes"
        )


def check_tensors(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, casts: bool) -> None:
    """Refuses a head's input and this rank's part of its weight and bias if they do not fit together.

    Args:
        casts: whether the input may be of another type than the weight.

    Raises:
        ValueError: a shape or type does not fit.
    """
    if weight.ndim != 2 or input.ndim < 1 or input.size(-1) != weight.size(1):
        raise ValueError(
            f"an input {list(input.shape)} was given for a weight {list(weight.shape)}: expected [*, {weight.size(-1)}]"
        )
    if bias is not None and list(bias.shape) != [len(weight)]:
        raise ValueError(f"a bias {list(bias.shape)} was given for {len(weight)} classes: expected [{len(weight)}]")
    types = {"input": input.dtype, "weight": weight.dtype, **({} if bias is None else {"bias": bias.dtype})}
    listed = ", ".join(f"{name} of {str(dtype).removeprefix('torch.')}" for name, dtype in types.items())
    if any(dtype not in _TYPES for dtype in types.values()):
        raise ValueError(f"{listed} were given: use floating-point types, of {', '.join(map(str, _TYPES))}")
    mixes_wide = len({dtype == torch.float64 for dtype in types.values()}) > 1
    if len(set(types.values())) > 1 and (autocast_dtype(input) is None or mixes_wide) and not casts:
        raise ValueError(
            f"{listed} were given: use one type, or torch.autocast"
            + (", which leaves fp64 alone" if mixes_wide else "")
        )
