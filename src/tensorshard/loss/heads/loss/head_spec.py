"""The options of a head's loss."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tensorshard.loss.heads.loss.margins import Margin
from tensorshard.loss.heads.tiles.precision import Precision
from tensorshard.loss.softmax_cross_entropy import CrossEntropySpec

if TYPE_CHECKING:
    from tensorshard.loss.heads.update.head_sgd import HeadSGD

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
    optimizer: "HeadSGD | None" = None
    step: int = 0


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The type of an enclosing ``torch.autocast`` for the device of `tensor`, or None."""
    if tensor.is_meta:
        return None
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which operations on the device of `tensor` compute in the types that they are given."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


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
