"""Operations on logits that do not compute them: layouts, casts, scales, shifts, caps and log-softmax are noted."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tensorshard.loss import layout_rules
from tensorshard.loss.deferred_tensor import (
    DETACHES,
    MOVES,
    RESHAPES,
    TYPE_CASTS,
    DeferredTensor,
    Rule,
    type_asked_for,
)
from tensorshard.loss.logits.linear_logits import LinearLogits
from tensorshard.loss.logits.pending_logits import PendingLogits, derived
from tensorshard.torch_private.fsdp import is_pre_backward_hook

# -- layout --


def _reshape(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    linear = logits.linear
    new = layout_rules.reshaped(func, linear.shape, linear.class_dim, args, kwargs)
    if new is None:
        return NotImplemented
    shape, dim = new
    shape[dim] = linear.features.size(linear.class_dim)
    return derived(logits, linear.laid_out(linear.features.reshape(shape), dim), func, args, kwargs)


def _move(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    linear = logits.linear
    dim = layout_rules.moved(func, len(linear.shape), linear.class_dim, args, kwargs)
    if dim is None:
        return NotImplemented
    return derived(logits, linear.laid_out(func(linear.features, *args, **kwargs), dim), func, args, kwargs)


def _index(func: Rule, logits: PendingLogits, index: Any) -> Any:
    linear = logits.linear
    new = layout_rules.indexed(index, linear.shape, linear.class_dim)
    if new is None:
        return NotImplemented
    return derived(logits, linear.laid_out(linear.features[new[0]], new[1]), func, (index,), {})


def _same(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    return derived(logits, logits.linear, func, args, kwargs)


def _detach(func: Rule, logits: PendingLogits) -> Any:
    return derived(logits, logits.linear.detached(), func, (), {})


# -- values --


def _cast(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    dtype = type_asked_for(func, args, kwargs)
    if dtype is None:
        return NotImplemented if not _stays(logits, args, kwargs) else logits
    if dtype == logits.seen_as:
        return logits
    if torch.promote_types(logits.seen_as, dtype) != dtype:
        return NotImplemented  # it would round the logits
    return derived(logits, logits.linear, func, args, kwargs, dtype=dtype)


def _stays(logits: PendingLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``.to(...)`` names the device that the logits are on."""
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], torch.device | str):
        return False
    device = torch.device(given[0])
    return device.type == logits.device.type and device.index in (None, logits.device.index)


def _arithmetic(change: Callable[[LinearLogits, Any], LinearLogits | None]) -> Rule:
    """The rule for an operation with one number, which `change` does."""

    def rule(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or logits.normalized:
            return NotImplemented
        changed = change(logits.linear, args[0])
        return NotImplemented if changed is None else derived(logits, changed, func, args, {})

    return rule


def _times(linear: LinearLogits, factor: Any) -> LinearLogits | None:
    return linear.times(float(factor)) if isinstance(factor, int | float) else None


def _over(linear: LinearLogits, divisor: Any) -> LinearLogits | None:
    return linear.times(1.0 / divisor) if isinstance(divisor, int | float) and divisor != 0 else None


def _plus(linear: LinearLogits, other: Any) -> LinearLogits | None:
    if isinstance(other, int | float):
        return linear.plus(float(other))
    if not isinstance(other, torch.Tensor) or isinstance(other, DeferredTensor):
        return None
    last = linear.class_dim == len(linear.shape) - 1
    if not last or other.numel() != linear.place.classes or other.shape[-1:] != linear.shape[-1:]:
        return None
    return linear.plus_bias(other.reshape(-1)) if other.ndim <= len(linear.shape) else None


def _minus(linear: LinearLogits, other: Any) -> LinearLogits | None:
    return linear.plus(-float(other)) if isinstance(other, int | float) else None


def _tanh(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    changed = None if args or kwargs or logits.normalized else logits.linear.tanh()
    return NotImplemented if changed is None else derived(logits, changed, func, (), {})


def _log_softmax(
    func: Rule, logits: PendingLogits, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # torch.log_softmax has its dtype argument at this position
        dtype = _stacklevel
    if logits.normalized or not logits.classes_at(dim) or not _is_wider(logits, dtype):
        return NotImplemented
    dtype = dtype or logits.seen_as
    kwargs = {"dim": dim, "dtype": dtype}
    return derived(logits, logits.linear, torch.log_softmax, (), kwargs, dtype=dtype, normalized=True)


def _is_wider(logits: PendingLogits, dtype: torch.dtype | None) -> bool:
    return dtype is None or torch.promote_types(logits.seen_as, dtype) == dtype


def _register_hook(func: Rule, logits: PendingLogits, hook: Callable[[torch.Tensor], Any]) -> Any:
    """FSDP's hook only needs to run when backward begins. Any other hook gets the logits' gradient, so logits are
    computed."""
    if not is_pre_backward_hook(hook) or not logits.linear.features.requires_grad:
        return NotImplemented
    return logits.linear.features.register_hook(hook)


_T: Any = torch.Tensor
_MULTIPLIED = _arithmetic(_times)
_DIVIDED = _arithmetic(_over)
_ADDED = _arithmetic(_plus)
_SUBTRACTED = _arithmetic(_minus)

NOTED: dict[Any, Rule] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(DETACHES, _detach),
    **dict.fromkeys((_T.contiguous, _T.clone, torch.clone), _same),
    _T.__getitem__: _index,
    **dict.fromkeys(TYPE_CASTS, _cast),
    **dict.fromkeys((_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.multiply, torch.multiply), _MULTIPLIED),
    **dict.fromkeys((_T.div, _T.true_divide, _T.__truediv__, torch.div, torch.true_divide), _DIVIDED),
    **dict.fromkeys((_T.add, _T.__add__, _T.__radd__, torch.add), _ADDED),
    **dict.fromkeys((_T.sub, _T.__sub__, torch.sub, _T.subtract, torch.subtract), _SUBTRACTED),
    **dict.fromkeys((_T.tanh, torch.tanh, F.tanh), _tanh),
    **dict.fromkeys((_T.log_softmax, torch.log_softmax, F.log_softmax), _log_softmax),
    _T.register_hook: _register_hook,
}
"""Operations whose results are not computed either, and their rules."""
