"""Logits that do not exist in full, in a tensor that looks as if they did.

A loss does not need all logits at once; other code may. So the output layer of a model returns a tensor of the full
shape that has only what the logits are made from, its *form*: this rank's shard of them (:mod:`split_logits`), or the
layer's input and weight (:mod:`linear_logits`). Changes of layout, casts, scales and caps are done to the form, and a
loss takes the form. Any other operation gets the full tensor, which is a plain one and is made once. From then on
everything is as if it had existed from the beginning: views share memory, and gradients are those of all uses.
(DTensor, too, has a rule for each operation on a sharded tensor. Here an operation without a rule gets the full one.)
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from tensorshard.torch_private.dispatch import make_wrapper_tensor, without_torch_functions_of_tensors
from tensorshard.torch_private.operators import schema
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import tensor_base_getter, tensor_version

# What reshapes, permutations and indexing do to a dimension that is split over ranks.
# Each rule takes a tensor's full shape and its split dimension. It returns how to do the operation on this rank's
# shard, and which dimension is split afterwards; None if the operation would cut the split dimension or merge it with
# others.


def reshaped(
    func: Callable[..., Any], shape: Sequence[int], dim: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[int], int] | None:
    """For a change of shape that keeps the order of elements (view, flatten, unsqueeze, ...).

    Returns:
        The new shape of the full tensor, and which of its dimensions is the split one.
    """
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None  # a view as another type
    try:
        new = list(func(torch.empty(shape, device="meta"), *args, **kwargs).shape)
    except (RuntimeError, TypeError, IndexError):
        return None  # the same call on the full tensor will raise torch's own error
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    for position, size in enumerate(new):
        same = math.prod(new[:position]) == before and math.prod(new[position + 1 :]) == after
        if size == shape[dim] and same and 0 not in new:
            return new, position
    return None


def moved(func: Callable[..., Any], ndim: int, dim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """For a permutation of dimensions: where `dim` is afterwards."""
    try:
        sizes = func(torch.empty(tuple(range(2, ndim + 2)), device="meta"), *args, **kwargs).shape
    except (RuntimeError, TypeError, IndexError):
        return None
    return list(sizes).index(dim + 2)


def indexed(index: Any, shape: Sequence[int], dim: int) -> tuple[tuple[Any, ...], int] | None:
    """For ``tensor[index]``: the index for a shard, and where `dim` is afterwards."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, list) for entry in entries):
        return None
    advanced = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    numbers = [entry for entry in entries if isinstance(entry, int)]
    if len(advanced) > 1 or (advanced and numbers):
        return None  # several index tensors are broadcast, and their dimensions move
    taken = sum(_dims_taken(entry) for entry in entries)
    if Ellipsis not in [entry for entry in entries if not isinstance(entry, torch.Tensor)]:
        entries.append(Ellipsis)
    part: list[Any] = []
    position, out = 0, 0
    split = None
    for entry in entries:
        if entry is Ellipsis:
            rest = len(shape) - taken
            if position <= dim < position + rest:
                split = out + dim - position
            part.append(entry)
            position, out = position + rest, out + rest
            continue
        length = _dims_taken(entry)
        if length and position <= dim < position + length:
            if not isinstance(entry, slice) or entry.indices(shape[dim]) != (0, shape[dim], 1):
                return None
            split = out
        part.append(entry)
        position, out = position + length, out + _dims_made(entry)
    return None if split is None else (tuple(part), split)


def _dims_taken(entry: Any) -> int:
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


def _dims_made(entry: Any) -> int:
    if isinstance(entry, torch.Tensor):
        return 1 if entry.dtype in (torch.bool, torch.uint8) else entry.ndim
    return 0 if isinstance(entry, int) and not isinstance(entry, bool) else 1


Rule = Callable[..., Any]
"""Does an operation on deferred logits: ``rule(operation, logits, *args, **kwargs)``. It returns NotImplemented if this
call needs the full tensor."""

Note = Callable[[str, bool], None]
"""Called at each use of logits, with the name of the operation and whether it needed the full tensor."""

Gradients = Callable[[Sequence[bool], torch.Tensor], tuple[torch.Tensor | None, ...]]
"""From which gradients of a form's tensors are needed, and the gradient of the logits, the tensors' gradients."""


class Form(ABC):
    """What logits are made from.

    Attributes:
        tensor: in the layout of the logits, but of another size along `class_dim`.
        class_dim: the dimension of the classes, counted from the front.
    """

    tensor: torch.Tensor
    class_dim: int

    has_values = False
    """Whether the form has logits itself. Then arithmetic makes logits of their own, and the form is still used where
    the full tensor exists."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the full logits."""

    @abstractmethod
    def sources(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that get gradients."""

    @abstractmethod
    def laid_out(self, tensor: torch.Tensor, class_dim: int) -> Self:
        """The same with another `tensor`, or with that in another layout."""

    @abstractmethod
    def detached(self) -> Self:
        """The same without gradients."""

    @abstractmethod
    def cast(self, before: torch.dtype, dtype: torch.dtype) -> Self | None:
        """These logits, shown in the type `before`, in the type `dtype`; None if the full tensor is needed for that."""

    @abstractmethod
    def changed(self, func: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> Self | None:
        """``func(logits, *args)``, an arithmetic operation on these logits in `dtype`; None as for :meth:`cast`."""

    @abstractmethod
    def full(self, dtype: torch.dtype) -> torch.Tensor:
        """The full logits, differentiable. A collective of the ranks that have the classes."""

    @abstractmethod
    def gradients(self, dtype: torch.dtype) -> Gradients:
        """The backward of :meth:`full`."""

    @abstractmethod
    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Registers a hook for backward; NotImplemented if it needs the gradient of the full tensor."""


class Source:
    """One output of a layer, and all tensors that stand for it or for a change of it.

    Args:
        rules: for operations on this kind of form, beside those that all forms have.
        note: called at each use.
    """

    def __init__(self, rules: Mapping[Any, Rule], note: Note = lambda *_: None) -> None:
        self.rules = rules
        self.note = note
        self.computed = False
        self.tiled = False
        self._members: list[weakref.ref[DeferredLogits]] = []

    def add(self, member: "DeferredLogits") -> None:
        self._members.append(weakref.ref(member))

    def members(self) -> "list[DeferredLogits]":
        """The tensors that still exist."""
        return [member for reference in self._members if (member := reference()) is not None]

    def take_tiles(self, by: str) -> None:
        """Called when the operation `by` computes its result a tile at a time."""
        self.tiled = True
        self.note(by, False)

    def compute(self, by: str) -> None:
        """Makes all tensors of this source that still exist: from now on an operation may write to memory that they
        share."""
        if self.computed:
            return
        self.computed = True
        self.note(by, True)
        for member in self.members():
            member.full()

    def is_reachable(self) -> bool:
        """Whether a tensor of this source exists that is not made."""
        return not self.computed and bool(self.members())


class DeferredLogits(torch.Tensor):
    """Stands for full logits: it has their shape, type and device, and a place in autograd's graph.

    An operation that needs the full tensor may be a collective: every rank that has classes must call it.

    Attributes:
        form: what they are made from. Its type may be narrower than the one shown.
        source: the output of the layer.
        seen_as: the type that this tensor shows.
    """

    form: Any  # a Form; rules know which one theirs is
    source: Source
    seen_as: torch.dtype
    _make: Callable[[], torch.Tensor]
    _with_grad: bool
    _full: torch.Tensor | None
    _version_made: int

    @staticmethod
    def __new__(
        cls, form: Form, dtype: torch.dtype, source: Source, make: Callable[[], torch.Tensor] | None, grad: bool
    ) -> "DeferredLogits":
        self = make_wrapper_tensor(cls, form.shape, dtype, form.tensor.device)
        self.form, self.source, self.seen_as = form, source, dtype
        self._make = make or (lambda: form.full(dtype))
        self._with_grad = grad
        self._full, self._version_made = None, 0
        source.add(self)
        return self

    def full(self) -> torch.Tensor:
        """The full tensor, a plain one. It is made at the first call."""
        if self._full is None:
            with torch.set_grad_enabled(self._with_grad):
                self._full = self._make()
            self._version_made = tensor_version(self._full)
        return self._full

    def classes_at(self, dim: Any) -> bool:
        """Whether `dim` is the dimension of the classes."""
        return isinstance(dim, int) and dim % len(self.form.shape) == self.form.class_dim

    def _rule(self, func: Callable[..., Any]) -> Rule | None:
        """The rule for `func`; None if it needs the full tensor."""
        if not self.source.computed:
            return _VIEWS.get(func) or _VALUES.get(func) or self.source.rules.get(func)
        if not self.form.has_values or self._full is None or tensor_version(self._full) != self._version_made:
            return None
        return _VALUES.get(func) or self.source.rules.get(func)

    def _before_full(self, func: Callable[..., Any]) -> None:
        if func is torch.autograd.grad and self.source.tiled and not self.source.computed:
            raise RuntimeError(
                "the gradient of logits was asked for, and a loss took these logits a tile at a time, so that nothing "
                "of it has gone through them. Call logits.retain_grad() before the loss, or use "
                "Plan(logits='whole')"
            )
        self.source.compute(name_of(func))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEED_NO_VALUES:
            with without_torch_functions_of_tensors():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and (rule := first._rule(func)) is not None:
            result = rule(func, first, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        plain_args, plain_kwargs = _with_full(func, tuple(args), kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits)]
        members = [member for source in {leaf.source for leaf in given} for member in source.members()]
        versions = [tensor_version(member.full()) for member in members]
        result = func(*plain_args, **plain_kwargs)
        for member, version in zip(members, versions, strict=True):
            if torch.is_grad_enabled() and tensor_version(member.full()) != version:
                _Written.apply(member, member.full())
        # An in-place operation returns its first argument.
        return first if isinstance(first, DeferredLogits) and result is plain_args[0] else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operations that do not pass through ``__torch_function__``, such as those of custom autograd functions. They
        compute on the full tensor, too."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if schema(func).is_mutable:
            raise RuntimeError(f"{func} would modify logits that are not held as a whole; pass it a clone of them")
        plain_args, plain_kwargs = _with_full(func, tuple(args), kwargs or {})
        return func(*plain_args, **plain_kwargs)


def defer(
    form: Form, dtype: torch.dtype, source: Source, make: Callable[[], torch.Tensor] | None = None
) -> DeferredLogits:
    """A tensor that stands for the logits of `form`, and shows the type `dtype`.

    Args:
        make: makes the full tensor; None: `form` does.
    """
    return _Tied.apply((form, dtype, source, make, torch.is_grad_enabled()), *form.sources())


def derived(
    logits: DeferredLogits,
    form: Form,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """The result of `func` on `logits`: logits of `form`. The full ones are ``func(logits, *args, **kwargs)``."""
    return defer(form, dtype or logits.seen_as, logits.source, lambda: func(logits.full(), *args, **kwargs))


def name_of(func: Any) -> str:
    """The name of `func` for messages."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def _with_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of `func` with full tensors in place of deferred ones."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, DeferredLogits):
            leaf._before_full(func)
    return tree_map_only(DeferredLogits, lambda leaf: leaf.full(), (args, kwargs))


class _Tied(torch.autograd.Function):
    """Connects a tensor that stands for logits to what they are made from in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, about: tuple[Any, ...], *sources: torch.Tensor | None) -> DeferredLogits:
        form, dtype, *_ = about
        ctx.set_materialize_grads(False)
        ctx.gradients = form.gradients(dtype)
        return DeferredLogits(*about)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        return None, *([None] * len(needed) if grads[0] is None else ctx.gradients(needed, grads[0]))


class _Written(torch.autograd.Function):
    """Notes in autograd's graph that the full tensor was changed in place: gradients flow through the full one."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits, full: torch.Tensor) -> DeferredLogits:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


def _reshape(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    form = logits.form
    new = reshaped(func, form.shape, form.class_dim, args, kwargs)
    if new is None:
        return NotImplemented
    shape, dim = new
    shape[dim] = form.tensor.size(form.class_dim)
    return derived(logits, form.laid_out(form.tensor.reshape(shape), dim), func, args, kwargs)


def _move(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    form = logits.form
    dim = moved(func, len(form.shape), form.class_dim, args, kwargs)
    if dim is None:
        return NotImplemented
    return derived(logits, form.laid_out(func(form.tensor, *args, **kwargs), dim), func, args, kwargs)


def _index(func: Any, logits: DeferredLogits, index: Any) -> Any:
    new = indexed(index, logits.form.shape, logits.form.class_dim)
    if new is None:
        return NotImplemented
    return derived(logits, logits.form.laid_out(logits.form.tensor[new[0]], new[1]), func, (index,), {})


def _same(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return derived(logits, logits.form, func, args, kwargs)


def _detach(func: Any, logits: DeferredLogits) -> Any:
    return derived(logits, logits.form.detached(), func, (), {})


def _cast(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    dtype = _type_asked_for(func, args, kwargs)
    if dtype is None:
        return logits if _stays(logits, args, kwargs) else NotImplemented
    if dtype == logits.seen_as:
        return logits
    return _with_values(logits, logits.form.cast(logits.seen_as, dtype), func, args, kwargs, dtype)


def _arithmetic(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    changed = None if kwargs else logits.form.changed(func, args, logits.seen_as)
    return _with_values(logits, changed, func, args, {}, logits.seen_as)


def _register_hook(func: Any, logits: DeferredLogits, hook: Callable[[torch.Tensor], Any]) -> Any:
    return logits.form.register_hook(hook)


def _with_values(
    logits: DeferredLogits,
    form: Form | None,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
) -> Any:
    """Logits of `form` with other values than `logits`, and so in other memory."""
    if form is None:
        return NotImplemented
    if form.has_values:  # `logits` need not be kept
        return defer(form, dtype, Source(logits.source.rules, logits.source.note))
    return derived(logits, form, func, args, kwargs, dtype)


def _type_asked_for(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The type that a cast asks for; None if the call does more than cast."""
    dtype = _CASTS.get(func)
    if dtype is not None:
        return None if args or kwargs else dtype
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return given[0] if len(given) == 1 and len(args) + len(kwargs) == 1 else None


def _stays(logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``.to(...)`` names the device that the logits are on."""
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], torch.device | str):
        return False
    try:
        device = torch.device(given[0])
    except RuntimeError:  # the name of a type
        return False
    return device.type == logits.device.type and device.index in (None, logits.device.index)


_T: Any = torch.Tensor
_GETTERS = ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda", "is_meta")
_NEED_NO_VALUES = {
    *(getattr(_T, name).__get__ for name in _GETTERS),
    tensor_base_getter(),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.__len__, _T.is_floating_point, _T.is_complex),
    *(torch.is_floating_point, torch.is_complex, torch.numel, _T.get_device, _T.element_size, _T.is_contiguous),
}
_CASTS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
_RESHAPES = (
    *(_T.view, _T.reshape, _T.flatten, _T.unflatten, _T.squeeze, _T.unsqueeze),
    *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze),
)
_MOVES = (
    *(_T.transpose, _T.permute, _T.movedim, _T.swapaxes, _T.swapdims, _T.t),
    *(torch.transpose, torch.permute, torch.movedim, torch.swapaxes, torch.swapdims, torch.t),
    *(_T.T.__get__, _T.mT.__get__),
)

TIMES = (_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.multiply, torch.multiply)
OVER = (_T.div, _T.true_divide, _T.__truediv__, torch.div, torch.true_divide)
PLUS = (_T.add, _T.__add__, _T.__radd__, torch.add)
MINUS = (_T.sub, _T.__sub__, torch.sub, _T.subtract, torch.subtract)
TANH = (_T.tanh, torch.tanh, torch.nn.functional.tanh)
NEGATIVE = (_T.neg, torch.neg, _T.__neg__)

# What is, or may be, a view of the full tensor. Once that exists, it is the result's memory.
_VIEWS: dict[Any, Rule] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys((_T.detach, torch.detach), _detach),
    **dict.fromkeys((_T.contiguous, _T.clone, torch.clone), _same),
    _T.__getitem__: _index,
}
_VALUES: dict[Any, Rule] = {
    **dict.fromkeys((*_CASTS, _T.to, _T.type), _cast),
    **dict.fromkeys((*TIMES, *OVER, *PLUS, *MINUS, *TANH, *NEGATIVE), _arithmetic),
    _T.register_hook: _register_hook,
}
