"""Logits that are not computed, which look like the computed ones to code that does not know.

A cross entropy does not need them: it can be computed a tile at a time. Other code may. So within a step a model's
output layer hands on what its logits follow from, under their shape, and what is done with it decides: layout changes,
scales, caps and casts are noted, a loss takes tiles, and anything else has them computed, once. From then on everything
is as if they had been there from the beginning: views are views of the same memory, gradients are those of all uses.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tensorshard.layers import layout_rules
from tensorshard.layers.deferred_tensor import (
    DETACHES,
    MOVES,
    RESHAPES,
    TYPE_CASTS,
    DeferredTensor,
    Rule,
    type_asked_for,
)
from tensorshard.layers.softmax_cross_entropy import CrossEntropySpec
from tensorshard.layers.split_cross_entropy import parallel_cross_entropy
from tensorshard.logits.linear_logits import LinearLogits
from tensorshard.torch_private.dispatch import make_wrapper_tensor
from tensorshard.torch_private.fsdp import is_pre_backward_hook

Note = Callable[[str, bool], None]
"""Told of each use of logits: by what name, and whether it had them computed."""


class Source:
    """One call of an output layer, and all tensors that stand for its logits or for what was made of them.

    Args:
        note: told of each use.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self.computed = False
        self.tiled = False
        self._members: list[weakref.ref[PendingLogits]] = []

    def add(self, member: "PendingLogits") -> None:
        self._members.append(weakref.ref(member))

    def take_tiles(self, by: str) -> None:
        """Called where `by` computes what it needs a tile at a time."""
        self.tiled = True
        self._note(by, False)

    def compute(self, by: str) -> None:
        """Has all that anybody can still reach computed: from now on memory may be written to that they share."""
        if self.computed:
            return
        self.computed = True
        self._note(by, True)
        for reference in self._members:
            member = reference()
            if member is not None:
                member.full()

    def is_reachable(self) -> bool:
        """Whether somebody has a tensor of this that is not computed."""
        return not self.computed and any(reference() is not None for reference in self._members)


class PendingLogits(DeferredTensor):
    """Logits, or what was made of them, which are not computed. Made by :func:`pending_logits`.

    Attributes:
        linear: what they follow from.
        normalized: whether this is their log-softmax.
        source: the call that they are from.
    """

    linear: LinearLogits
    normalized: bool
    source: Source
    _dtype: torch.dtype
    _made: Callable[[], torch.Tensor]
    _with_grad: bool
    _full: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        linear: LinearLogits,
        dtype: torch.dtype,
        normalized: bool,
        source: Source,
        made: Callable[[], torch.Tensor] | None,
        grad: bool,
    ) -> "PendingLogits":
        self = make_wrapper_tensor(cls, linear.shape, dtype, linear.features.device)
        self.linear, self.normalized, self.source, self._dtype = linear, normalized, source, dtype
        self._made = made or (lambda: linear.compute(dtype))
        self._with_grad = grad
        self._full = None
        source.add(self)
        return self

    def full(self) -> torch.Tensor:
        """The logits themselves, computed once."""
        if self._full is None:
            with torch.set_grad_enabled(self._with_grad):
                self._full = self._made()
        return self._full

    def before_full(self, func: Rule) -> None:
        if func is torch.autograd.grad and self.source.tiled and not self.source.computed:
            raise RuntimeError(
                "the gradient of logits was asked for, and a loss took these logits a tile at a time, so that nothing "
                "of it has gone through them. Call logits.retain_grad() before the loss, or use "
                "Plan(logits='whole')"
            )
        self.source.compute(_name(func))

    def rule(self, func: Rule) -> Rule | None:
        return None if self.source.computed else _RULES.get(func)

    def classes_at(self, dim: Any) -> bool:
        """Whether `dim` is where the classes are."""
        return isinstance(dim, int) and dim % len(self.linear.shape) == self.linear.class_dim


def pending_logits(linear: LinearLogits, dtype: torch.dtype, note: Note) -> tuple[PendingLogits, Source]:
    """What stands for the logits of `linear`, seen as `dtype`, and what knows of all that is made of it.

    Args:
        note: told of each use.
    """
    source = Source(note)
    return _pending(linear, dtype, False, source, None), source


def _pending(
    linear: LinearLogits,
    dtype: torch.dtype,
    normalized: bool,
    source: Source,
    made: Callable[[], torch.Tensor] | None,
) -> PendingLogits:
    about = (linear, dtype, normalized, source, made, torch.is_grad_enabled())
    return _Tied.apply(linear.features, linear.weight, linear.bias, about)


class _Tied(torch.autograd.Function):
    """Ties what stands for logits to what they follow from, for what autograd computes from it directly."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, about: tuple[Any, ...]
    ) -> PendingLogits:
        linear, dtype, normalized, *_ = about
        ctx.set_materialize_grads(False)
        ctx.linear, ctx.about = linear.detached(), (dtype, normalized)
        return PendingLogits(*about)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None, None
        dtype, normalized = ctx.about
        linear: LinearLogits = ctx.linear
        tensors = [linear.features, linear.weight, linear.bias]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:3]) if needed]
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
            logits = linear.with_tensors(*leaves).compute(dtype)
            logits = logits.log_softmax(linear.class_dim) if normalized else logits
        found = torch.autograd.grad(logits, [leaves[i] for i in wanted], grads[0])  # type: ignore[misc]
        by_index = dict(zip(wanted, found, strict=True))
        return by_index.get(0), by_index.get(1), by_index.get(2), None


def _made_of(logits: PendingLogits, func: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How the full tensor of `func`'s result is made, should it be needed."""
    return lambda: func(logits.full(), *args, **kwargs)


# -- rules: layout --


def _reshape(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    linear = logits.linear
    new = layout_rules.reshaped(func, linear.shape, linear.class_dim, args, kwargs)
    if new is None:
        return NotImplemented
    shape, dim = new
    shape[dim] = linear.features.size(linear.class_dim)
    return _like(logits, linear.laid_out(linear.features.reshape(shape), dim), func, args, kwargs)


def _move(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    linear = logits.linear
    dim = layout_rules.moved(func, len(linear.shape), linear.class_dim, args, kwargs)
    if dim is None:
        return NotImplemented
    return _like(logits, linear.laid_out(func(linear.features, *args, **kwargs), dim), func, args, kwargs)


def _index(func: Rule, logits: PendingLogits, index: Any) -> Any:
    linear = logits.linear
    new = layout_rules.indexed(index, linear.shape, linear.class_dim)
    if new is None:
        return NotImplemented
    return _like(logits, linear.laid_out(linear.features[new[0]], new[1]), func, (index,), {})


def _same(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    return _like(logits, logits.linear, func, args, kwargs)


def _detach(func: Rule, logits: PendingLogits) -> Any:
    return _like(logits, logits.linear.detached(), func, (), {})


def _like(
    logits: PendingLogits,
    linear: LinearLogits,
    func: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    normalized: bool | None = None,
) -> Any:
    return _pending(
        linear,
        dtype or logits._dtype,
        logits.normalized if normalized is None else normalized,
        logits.source,
        _made_of(logits, func, args, kwargs),
    )


# -- rules: values --


def _cast(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    dtype = type_asked_for(func, args, kwargs)
    if dtype is None:
        return NotImplemented if not _stays(logits, args, kwargs) else logits
    if dtype == logits._dtype:
        return logits
    if torch.promote_types(logits._dtype, dtype) != dtype:
        return NotImplemented  # rounds
    return _like(logits, logits.linear, func, args, kwargs, dtype=dtype)


def _stays(logits: PendingLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``.to(...)`` names the device where logits are."""
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], torch.device | str):
        return False
    device = torch.device(given[0])
    return device.type == logits.device.type and device.index in (None, logits.device.index)


def _arithmetic(change: Callable[[LinearLogits, Any], LinearLogits | None]) -> Rule:
    """A rule for an operation with one number, which `change` does."""

    def rule(func: Rule, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or logits.normalized:
            return NotImplemented
        changed = change(logits.linear, args[0])
        return NotImplemented if changed is None else _like(logits, changed, func, args, {})

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
    return NotImplemented if changed is None else _like(logits, changed, func, (), {})


def _log_softmax(
    func: Rule, logits: PendingLogits, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # torch.log_softmax has the type in its place
        dtype = _stacklevel
    if logits.normalized or not logits.classes_at(dim) or not _is_wider(logits, dtype):
        return NotImplemented
    dtype = dtype or logits._dtype
    kwargs = {"dim": dim, "dtype": dtype}
    return _like(logits, logits.linear, torch.log_softmax, (), kwargs, dtype=dtype, normalized=True)


def _is_wider(logits: PendingLogits, dtype: torch.dtype | None) -> bool:
    return dtype is None or torch.promote_types(logits._dtype, dtype) == dtype


# -- rules: what tiles give --


def _cross_entropy(
    func: Rule,
    logits: PendingLogits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if logits.normalized:
        return NotImplemented
    return _loss(func, logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _nll_loss(
    func: Rule,
    logits: PendingLogits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if not logits.normalized:
        return NotImplemented
    return _loss(func, logits, target, weight, size_average, ignore_index, reduce, reduction, 0.0)


def _loss(
    func: Rule,
    logits: PendingLogits,
    target: Any,
    weight: torch.Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Any:
    legacy = size_average is not None or reduce is not None
    if legacy or not _takes_classes(logits, target) or (weight is not None and weight.requires_grad):
        return NotImplemented
    linear = logits.linear
    if weight is not None and list(weight.shape) != [linear.place.classes]:
        return NotImplemented  # torch says what is wrong
    spec = CrossEntropySpec(linear.place.classes, ignore_index, label_smoothing, reduction=reduction)
    logits.source.take_tiles(_name(func))
    return linear.loss(target, weight, spec).to(logits._dtype)


def _takes_classes(logits: PendingLogits, target: Any) -> bool:
    """Whether `target` has a class for each sample of logits, along whose second dimension the classes are."""
    linear = logits.linear
    second = linear.class_dim == min(1, len(linear.shape) - 1)
    if not second or not isinstance(target, torch.Tensor) or isinstance(target, DeferredTensor):
        return False
    whole = not target.is_floating_point() and target.dtype != torch.bool
    return whole and target.shape == linear.token_shape and target.device == logits.device and target.numel() > 0


def _gather(func: Rule, logits: PendingLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    """The log-probability of one class a token: as policy gradients and sequence scores take it."""
    linear = logits.linear
    one = isinstance(index, torch.Tensor) and list(index.shape) == [
        1 if d == linear.class_dim else size for d, size in enumerate(linear.shape)
    ]
    if kwargs or not logits.normalized or not one or not logits.classes_at(dim) or index.numel() == 0:
        return NotImplemented
    spec = CrossEntropySpec(linear.place.classes, ignore_index=-1, reduction="none")
    logits.source.take_tiles(_name(func))
    losses = linear.loss(index.squeeze(linear.class_dim), None, spec).to(logits._dtype)
    return -losses.unsqueeze(linear.class_dim)


def _our_cross_entropy(func: Rule, logits: PendingLogits, target: Any, *args: Any, **kwargs: Any) -> Any:
    """``parallel_cross_entropy``, which takes more than that of torch."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    linear = logits.linear
    plain = given.get("size_average") is None and given.get("reduce") is None and given.get("group") is None
    capped = given.get("softcap") is not None
    if logits.normalized or not plain or capped or linear.shift or not _takes_classes(logits, target):
        return NotImplemented
    weight = given.get("weight")
    if weight is not None and (weight.requires_grad or list(weight.shape) != [linear.place.classes]):
        return NotImplemented
    spec = CrossEntropySpec(
        linear.place.classes,
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
        given.get("z_loss", 0.0),
        given.get("reduction", "mean"),
        None,
        given.get("use_token_scaling", False),
        given.get("return_lse", False),
        given.get("return_token_accuracy", False),
    )
    logits.source.take_tiles(_name(func))
    return linear.loss(target, weight, spec)


def _log_sum_exp(func: Rule, logits: PendingLogits, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, tuple | list) else []
    alone = len(dims) == 1 and logits.classes_at(dims[0])
    if kwargs or not alone or logits.normalized or logits.linear.token_shape.numel() == 0:
        return NotImplemented
    logits.source.take_tiles(_name(func))
    result = logits.linear.log_sum_exp().to(logits._dtype)
    return result.unsqueeze(logits.linear.class_dim) if keepdim else result


def _argmax(func: Rule, logits: PendingLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.classes_at(dim) or logits.linear.token_shape.numel() == 0:
        return NotImplemented
    logits.source.take_tiles(_name(func))
    classes = logits.linear.largest(1)[1].movedim(-1, logits.linear.class_dim)
    return classes if keepdim else classes.squeeze(logits.linear.class_dim)


def _topk(func: Rule, logits: PendingLogits, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    linear = logits.linear
    fits = isinstance(k, int) and 0 < k <= linear.place.classes and linear.token_shape.numel() > 0
    if not fits or not largest or logits.normalized or not logits.classes_at(dim):
        return NotImplemented
    if logits.requires_grad and torch.is_grad_enabled() and linear.place.group is not None:
        return NotImplemented
    logits.source.take_tiles(_name(func))
    values, classes = linear.largest(k)
    if logits.requires_grad and torch.is_grad_enabled():
        values = _Picked.apply(linear.features, linear.weight, linear.bias, linear, values, classes)
    moved = [result.movedim(-1, linear.class_dim) for result in (values.to(logits._dtype), classes)]
    return torch.return_types.topk(moved)  # type: ignore[attr-defined]


def _max(func: Rule, logits: PendingLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.classes_at(dim):
        return NotImplemented
    found = _topk(func, logits, 1, dim)
    if found is NotImplemented:
        return NotImplemented
    results = found if keepdim else [result.squeeze(logits.linear.class_dim) for result in found]
    return torch.return_types.max(list(results))  # type: ignore[attr-defined]


class _Picked(torch.autograd.Function):
    """Some classes' logits of each token, which were found already."""

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
        linear: LinearLogits = ctx.linear
        (classes,) = ctx.saved_tensors
        tensors = [linear.features, linear.weight, linear.bias]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:3]) if needed]
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
            picked = linear.with_tensors(*leaves).pick(classes)
        found = torch.autograd.grad(picked, [leaves[i] for i in wanted], grads[0])  # type: ignore[misc]
        by_index = dict(zip(wanted, found, strict=True))
        return by_index.get(0), by_index.get(1), by_index.get(2), None, None, None


def _register_hook(func: Rule, logits: PendingLogits, hook: Callable[[torch.Tensor], Any]) -> Any:
    """FSDP wants to know when backward begins. Whoever else asks is to see the logits' gradient, which has to be."""
    if not is_pre_backward_hook(hook) or not logits.linear.features.requires_grad:
        return NotImplemented
    return logits.linear.features.register_hook(hook)


def _name(func: Any) -> str:
    """What people call `func`."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


_T: Any = torch.Tensor
_MULTIPLIED = _arithmetic(_times)
_DIVIDED = _arithmetic(_over)
_ADDED = _arithmetic(_plus)
_SUBTRACTED = _arithmetic(_minus)
_RULES: dict[Any, Rule] = {
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
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    parallel_cross_entropy: _our_cross_entropy,
    **dict.fromkeys((_T.gather, torch.gather), _gather),
    **dict.fromkeys((_T.logsumexp, torch.logsumexp), _log_sum_exp),
    **dict.fromkeys((_T.argmax, torch.argmax), _argmax),
    **dict.fromkeys((_T.topk, torch.topk), _topk),
    **dict.fromkeys((_T.max, torch.max), _max),
    _T.register_hook: _register_hook,
}
