"""Tensors that stand for full ones which do not exist yet. The full one is made only if an operation needs it.

A subclass has a rule for each operation that can do without the full tensor. Any other operation gets the full tensor,
which is a plain one and is made once. (DTensor, too, has a rule for each operation on a sharded tensor. Here an
operation without a rule gets the full tensor.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.operators import schema
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import tensor_base_getter, tensor_version

Rule = Callable[..., Any]


class DeferredTensor(torch.Tensor):
    """Stands for a full tensor: it has that tensor's shape, type and device, and a place in autograd's graph."""

    def full(self) -> torch.Tensor:
        """The full tensor, a plain one. It is made at the first call."""
        raise NotImplementedError

    def rule(self, func: Rule) -> Rule | None:
        """The function that does `func` without the full tensor, called as ``rule(func, self, *args, **kwargs)``; it
        may still return NotImplemented. None if `func` needs the full tensor."""
        raise NotImplementedError

    def before_full(self, func: Rule) -> None:
        """Called before `func` is given the full tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEED_NO_VALUES:
            with without_torch_functions_of_tensors():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DeferredTensor) and (rule := first.rule(func)) is not None:
            result = rule(func, first, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredTensor)]
        for leaf in given:
            leaf.before_full(func)
        plain_args, plain_kwargs = tree_map_only(DeferredTensor, lambda leaf: leaf.full(), (tuple(args), kwargs))
        versions = [tensor_version(leaf.full()) for leaf in given]
        result = func(*plain_args, **plain_kwargs)
        for leaf, version in zip(given, versions, strict=True):
            if torch.is_grad_enabled() and tensor_version(leaf.full()) != version:
                _Written.apply(leaf, leaf.full())
        # An in-place operation returns its first argument.
        return first if isinstance(first, DeferredTensor) and result is plain_args[0] else result

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
        for leaf in tree_leaves((tuple(args), kwargs or {})):
            if isinstance(leaf, DeferredTensor):
                leaf.before_full(func)
        plain_args, plain_kwargs = tree_map_only(DeferredTensor, lambda leaf: leaf.full(), (tuple(args), kwargs or {}))
        return func(*plain_args, **plain_kwargs)


class _Written(torch.autograd.Function):
    """Notes in autograd's graph that the full tensor was changed in place: gradients flow through the full one."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredTensor, full: torch.Tensor) -> DeferredTensor:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


def type_asked_for(func: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The type that a cast asks for; None if the call does more than cast."""
    dtype = CASTS.get(func)
    if dtype is not None:
        return None if args or kwargs else dtype
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return given[0] if len(given) == 1 and len(args) + len(kwargs) == 1 else None


_T: Any = torch.Tensor
_GETTERS = ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda", "is_meta")
_NEED_NO_VALUES = {
    *(getattr(_T, name).__get__ for name in _GETTERS),
    tensor_base_getter(),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.__len__, _T.is_floating_point, _T.is_complex),
    *(torch.is_floating_point, torch.is_complex, torch.numel, _T.get_device, _T.element_size, _T.is_contiguous),
}

CASTS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
"""Methods that cast, and to what."""

TYPE_CASTS = (*CASTS, _T.to, _T.type)
"""Methods that may cast: :func:`type_asked_for` says whether a call does."""

RESHAPES = (
    *(_T.view, _T.reshape, _T.flatten, _T.unflatten, _T.squeeze, _T.unsqueeze),
    *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze),
)
"""Changes of shape that keep the order of elements."""

MOVES = (
    *(_T.transpose, _T.permute, _T.movedim, _T.swapaxes, _T.swapdims, _T.t),
    *(torch.transpose, torch.permute, torch.movedim, torch.swapaxes, torch.swapdims, torch.t),
    *(_T.T.__get__, _T.mT.__get__),
)
"""Permutations of dimensions."""

DETACHES = (_T.detach, torch.detach)
