"""Results that are computed from a linear layer's logits a tile at a time: cross entropies, log-sum-exps, top k."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tensorshard.loss.formulas import CrossEntropySpec
from tensorshard.loss.logits.deferred_logits import DeferredLogits, Rule, derived, name_of
from tensorshard.loss.logits.linear_logits import LinearLogits
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy


def _cross_entropy(
    func: Rule,
    logits: DeferredLogits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` of logits, or ``F.nll_loss`` of their log-softmax, which has no smoothing."""
    is_nll = func is F.nll_loss
    legacy = size_average is not None or reduce is not None
    if legacy or logits.form.normalized != is_nll or (is_nll and label_smoothing):
        return NotImplemented
    if not _takes_classes(logits, target) or not _takes_weights(logits, weight):
        return NotImplemented
    spec = CrossEntropySpec(logits.form.place.classes, ignore_index, label_smoothing, reduction=reduction)
    logits.source.take_tiles(name_of(func))
    return logits.form.loss(target, weight, spec).to(logits.seen_as)


def _takes_classes(logits: DeferredLogits, target: Any) -> bool:
    """Whether `target` has a class for each sample of logits, along whose second dimension the classes are."""
    linear = logits.form
    second = linear.class_dim == min(1, len(linear.shape) - 1)
    if not second or not isinstance(target, torch.Tensor) or isinstance(target, DeferredLogits):
        return False
    is_integer = not target.is_floating_point() and target.dtype != torch.bool
    return is_integer and target.shape == linear.token_shape and target.device == logits.device and target.numel() > 0


def _takes_weights(logits: DeferredLogits, weight: torch.Tensor | None) -> bool:
    """Whether `weight` is none, or a weight for each class. torch's own error says what else is wrong."""
    return weight is None or (not weight.requires_grad and list(weight.shape) == [logits.form.place.classes])


def _log_softmax(
    func: Rule, logits: DeferredLogits, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # torch.log_softmax has its dtype argument at this position
        dtype = _stacklevel
    dtype = dtype or logits.seen_as
    if logits.form.normalized or not logits.classes_at(dim) or logits.form.cast(logits.seen_as, dtype) is None:
        return NotImplemented
    form = replace(logits.form, normalized=True)
    return derived(logits, form, torch.log_softmax, (), {"dim": dim, "dtype": dtype}, dtype)


def _gather(func: Rule, logits: DeferredLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    """The log-probability of one class a token, for policy gradients and sequence scores."""
    linear = logits.form
    one = isinstance(index, torch.Tensor) and list(index.shape) == [
        1 if d == linear.class_dim else size for d, size in enumerate(linear.shape)
    ]
    if kwargs or not logits.form.normalized or not one or not logits.classes_at(dim) or index.numel() == 0:
        return NotImplemented
    spec = CrossEntropySpec(linear.place.classes, ignore_index=-1, reduction="none")
    logits.source.take_tiles(name_of(func))
    losses = linear.loss(index.squeeze(linear.class_dim), None, spec).to(logits.seen_as)
    return -losses.unsqueeze(linear.class_dim)


def _our_cross_entropy(func: Rule, logits: DeferredLogits, target: Any, *args: Any, **kwargs: Any) -> Any:
    """``parallel_cross_entropy``, which has more options than torch's own."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    refused = [given.pop(name, None) for name in ("size_average", "reduce", "group", "softcap")]
    weight, linear = given.pop("weight", None), logits.form
    if any(value is not None for value in refused) or linear.normalized or linear.shift:
        return NotImplemented
    if not _takes_classes(logits, target) or not _takes_weights(logits, weight):
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    return linear.loss(target, weight, CrossEntropySpec(linear.place.classes, **given))


def _log_sum_exp(func: Rule, logits: DeferredLogits, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, tuple | list) else []
    alone = len(dims) == 1 and logits.classes_at(dims[0])
    if kwargs or not alone or logits.form.normalized or logits.form.token_shape.numel() == 0:
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    result = logits.form.log_sum_exp().to(logits.seen_as)
    return result.unsqueeze(logits.form.class_dim) if keepdim else result


def _argmax(func: Rule, logits: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.classes_at(dim) or logits.form.token_shape.numel() == 0:
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    classes = logits.form.largest(1)[1].movedim(-1, logits.form.class_dim)
    return classes if keepdim else classes.squeeze(logits.form.class_dim)


def _topk(func: Rule, logits: DeferredLogits, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    linear = logits.form
    fits = isinstance(k, int) and 0 < k <= linear.place.classes and linear.token_shape.numel() > 0
    if not fits or not largest or logits.form.normalized or not logits.classes_at(dim):
        return NotImplemented
    if logits.requires_grad and torch.is_grad_enabled() and linear.place.group is not None:
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    values, classes = linear.largest(k)
    if logits.requires_grad and torch.is_grad_enabled():
        values = _Picked.apply(linear.features, linear.weight, linear.bias, linear, values, classes)
    moved = [result.movedim(-1, linear.class_dim) for result in (values.to(logits.seen_as), classes)]
    return torch.return_types.topk(moved)  # type: ignore[attr-defined, arg-type]


def _max(func: Rule, logits: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.classes_at(dim):
        return NotImplemented
    largest = _topk(func, logits, 1, dim)
    if largest is NotImplemented:
        return NotImplemented
    results = largest if keepdim else [result.squeeze(logits.form.class_dim) for result in largest]
    return torch.return_types.max(list(results))  # type: ignore[attr-defined, arg-type]


class _Picked(torch.autograd.Function):
    """The logits of some classes of each token, which were computed before."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: LinearLogits,
        values: torch.Tensor,
        classes: torch.Tensor,
    ) -> torch.Tensor:
        ctx.linear = linear.detached()
        ctx.save_for_backward(classes)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (classes,) = ctx.saved_tensors
        gradients = ctx.linear.gradients_by(lambda linear: linear.pick(classes), ctx.needs_input_grad, grads[0])
        return *gradients, None, None, None


_T: Any = torch.Tensor

TILED: dict[Any, Rule] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _cross_entropy,
    parallel_cross_entropy: _our_cross_entropy,
    **dict.fromkeys((_T.log_softmax, torch.log_softmax, F.log_softmax), _log_softmax),
    **dict.fromkeys((_T.gather, torch.gather), _gather),
    **dict.fromkeys((_T.logsumexp, torch.logsumexp), _log_sum_exp),
    **dict.fromkeys((_T.argmax, torch.argmax), _argmax),
    **dict.fromkeys((_T.topk, torch.topk), _topk),
    **dict.fromkeys((_T.max, torch.max), _max),
}
"""Operations whose results are computed from one tile of logits at a time, and their rules."""
