"""Losses: local at each position, then a mean over what all ranks have."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import sum_ranks
from tensorshard.context_parallel.layout_changes import part_of
from tensorshard.context_parallel.rule_table import Signature, name_of, rule
from tensorshard.context_parallel.rules.pointwise import pointwise, without_reduction
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_CROSS_ENTROPY = Signature(
    lambda input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0: 0
)  # fmt: skip


@rule("cross_entropy", "nll_loss")
def cross_entropy(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The loss of classes. The positions may be any dimension but the classes."""
    call = _CROSS_ENTROPY.bind(args, kwargs)
    if call is None or call["size_average"] is not None or call["reduce"] is not None:
        return NotImplemented
    x, target, weight, ignored = call["input"], call["target"], call["weight"], call["ignore_index"]
    if not isinstance(x, SequenceTensor) or x.ndim < 2 or x.split_dim == 1 or isinstance(weight, SequenceTensor):
        return NotImplemented
    has_probabilities = target.is_floating_point()
    dim = x.split_dim - (x.split_dim > 0)
    target = part_of(target, x.split_dim if has_probabilities else dim, x.sequence, name_of(func), x.group)
    options = {"label_smoothing": call["label_smoothing"]} if name_of(func) == "cross_entropy" else {}
    local = func(x.local, target, weight=weight, ignore_index=ignored, reduction="none", **options)
    if call["reduction"] == "none":
        return SequenceTensor(local, dim, x.sequence, x.group)
    if call["reduction"] == "sum":
        return sum_ranks(local.sum(), "loss", x.group)
    if has_probabilities:
        return sum_ranks(local.sum(), "loss", x.group) / (x.numel() // x.shape[1])
    valid = (target != ignored).to(local.dtype)
    if weight is not None:
        valid = valid * weight[target.clamp(min=0)]
    both = sum_ranks(torch.stack([local.sum(), valid.sum().to(local.dtype)]), "loss", x.group)
    return both[0] / both[1]


_BY_ELEMENT = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "poisson_nll_loss",
)  # fmt: skip
_TWO = Signature(lambda input, target, reduction="mean", **options: 0)


@rule(*_BY_ELEMENT, "binary_cross_entropy_with_logits", "soft_margin_loss")
def by_element(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A loss that is computed element by element."""
    if len(args) == 3 and args[2] is None:
        args = args[:2]
    call = None if len(args) > 2 else _TWO.bind(args, kwargs)
    if call is None or call["reduction"] not in ("mean", "sum", "none"):
        return NotImplemented
    options = call.get("options", {})
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        return NotImplemented
    losses = pointwise(without_reduction(func), (call["input"], call["target"]), options)
    if losses is NotImplemented or call["reduction"] == "none":
        return losses
    return losses.mean() if call["reduction"] == "mean" else losses.sum()
