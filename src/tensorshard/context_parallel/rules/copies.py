"""Copies, casts and new tensors of the same shape: the layout stays."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.layout_changes import cut_for, on_meta, sequence_tensors
from tensorshard.context_parallel.rule_table import name_of, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_CASTS = (
    "float", "double", "half", "bfloat16", "int", "long", "bool", "short", "byte", "char", "type", "cfloat",
    "cdouble",
)  # fmt: skip
_COPIES = (
    "contiguous", "resolve_conj", "resolve_neg", "clone", "detach", "cpu", "cuda", "data",
    "alias", "__copy__", "requires_grad_", "pin_memory",
)  # fmt: skip
_FILLED = ["zeros_like", "ones_like", "full_like", "empty_like"]


@rule(*_CASTS, *_COPIES, *_FILLED)
def same_layout(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation on one tensor that keeps its shape."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, SequenceTensor) or sequence_tensors((tuple(args[1:]), kwargs)):
        return NotImplemented
    out = func(x.local, *args[1:]) if args and not kwargs else func(x.local, *args[1:], **kwargs)
    if out is x.local:
        return x
    return x.like(out) if isinstance(out, torch.Tensor) else out


@rule("to", "type_as")
def to(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A cast, perhaps to another tensor's type."""
    args = (args[0], *(arg.local if isinstance(arg, SequenceTensor) else arg for arg in args[1:]))
    kwargs = {key: value.local if isinstance(value, SequenceTensor) else value for key, value in kwargs.items()}
    return same_layout(func, args, kwargs) if isinstance(args[0], SequenceTensor) else func(*args, **kwargs)


@rule("data=")
def set_data(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.data = y``."""
    x, value = args
    if isinstance(x, SequenceTensor) and isinstance(value, SequenceTensor) and x.shape == value.shape:
        x.local, x.split_dim, x.sequence = value.local.detach(), value.split_dim, value.sequence
        x._gathered = x._turned = None
        return None
    raise NotImplementedError("x.data = y needs tensors that are both cut along their sequence, or both whole")


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def new(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A new tensor of any shape. It is cut if it has the same number of positions in the same dimension."""
    x = args[0]
    if not isinstance(x, SequenceTensor) or sequence_tensors((tuple(args[1:]), kwargs)):
        return NotImplemented
    out = func(x.local, *args[1:], **kwargs)
    if out.ndim == x.ndim and out.shape[x.split_dim] == x.sequence.length:
        return cut_for(out, x.split_dim, x.sequence, x.group)
    return out


@rule("result_type", "can_cast", "promote_types")
def types(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Questions for types."""
    return func(*on_meta(tuple(args)))


@rule("is_same_size", "is_set_to", "stride", "storage_offset", "nelement", "ndimension")
def geometry(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Questions for the shape, answered as for a whole contiguous tensor."""
    name = name_of(func)
    if name == "is_set_to":
        return args[0] is args[1]
    return func(*on_meta(tuple(args)), **kwargs)


@rule("view_as_complex", "view_as_real")
def complex_views(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Pairs of numbers as complex ones, and back."""
    x = args[0]
    if x.split_dim == x.ndim - 1 and name_of(func) == "view_as_complex":
        return NotImplemented
    return x.like(func(x.local.contiguous()))
