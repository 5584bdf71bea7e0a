"""Operations that compute element by element: local, once all tensors have the layout of one of them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import take
from tensorshard.context_parallel.layout_changes import aligned, map_tensors, sequence_tensors
from tensorshard.context_parallel.rule_table import name_of, rule, writes
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_ACTIVATIONS = (
    "relu", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "mish", "celu", "selu", "hardshrink",
    "softshrink",
)  # fmt: skip
_OTHERS = (
    "softplus", "hardtanh", "relu6", "prelu", "logsigmoid", "softsign", "tanhshrink", "hardsigmoid", "hardswish",
    "threshold",
)  # fmt: skip


@rule("broadcast_tensors", "polar", "complex", "isclose", "masked_fill", "where", "copy", *_ACTIVATIONS)
def pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An element-by-element operation with broadcasting."""
    if len(args) <= 3 and args and type(args[0]) is SequenceTensor and not (kwargs and _has_tensors(kwargs)):
        result = _in_one_layout(func, args, kwargs)
        if result is not NotImplemented:
            return result
    name = name_of(func)
    is_write = writes(name)
    if kwargs.get("out") is not None or (is_write and not isinstance(args[0], SequenceTensor)):
        return NotImplemented
    if name == "where" and len(args) + len(kwargs) == 1:  # the positions where the condition holds
        return NotImplemented
    lead = args[0] if is_write else leading(sequence_tensors((args, kwargs)))
    from_end, layout = lead.split_dim - lead.ndim, lead.sequence
    local_args, local_kwargs = map_tensors(lambda t: aligned(t, lead, name), (tuple(args), kwargs))
    out = func(*local_args, **local_kwargs)
    if is_write:
        return args[0]
    return map_tensors(lambda o: SequenceTensor(o, o.ndim + from_end, layout, lead.group), out)


def _has_tensors(kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor | tuple | list) for value in kwargs.values())


def _in_one_layout(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The usual case, without a search: sequence tensors of one layout, numbers and plain tensors."""
    x = args[0]
    ndim, layout, parts = len(x._whole_shape), x.sequence, []
    from_end = x.split_dim - ndim
    for arg in args:
        if type(arg) is SequenceTensor:
            if arg.sequence is not layout or arg.split_dim - len(arg._whole_shape) != from_end:
                return NotImplemented
            parts.append(arg.local)
        elif isinstance(arg, torch.Tensor):
            if arg.dim() > ndim:
                return NotImplemented
            is_cut = arg.dim() >= -from_end and arg.shape[from_end] != 1
            parts.append(take(arg, arg.dim() + from_end, layout.index(x.group.rank)) if is_cut else arg)
        else:
            parts.append(arg)
    if len(parts) == 1 and name_of(func) == "where":
        return NotImplemented
    out = func(*parts, **kwargs) if kwargs else func(*parts)
    if type(out) is torch.Tensor:
        return x if out is x.local else SequenceTensor(out, out.dim() + from_end, layout, x.group)
    if out is x.local:
        return x
    return map_tensors(lambda o: SequenceTensor(o, o.ndim + from_end, layout, x.group), out)


def leading(tensors: Sequence[SequenceTensor]) -> SequenceTensor:
    """The tensor whose layout the result gets: a sequence's own rather than one for a while, the largest, and rows
    rather than columns."""
    return max(tensors, key=lambda t: (t.sequence.is_home, t.numel(), t.ndim - t.split_dim))


@rule("zero", "fill", "positive", *_OTHERS)
def unary(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An element-by-element operation on its first argument."""
    x = args[0]
    if not isinstance(x, SequenceTensor) or sequence_tensors((tuple(args[1:]), kwargs)):
        return pointwise(func, args, kwargs) if sequence_tensors((tuple(args), kwargs)) else NotImplemented
    weights = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.Tensor) and arg.numel() > 1]
    if weights and (name_of(func) != "prelu" or x.split_dim == 1):
        return NotImplemented
    out = func(x.local, *args[1:], **kwargs)
    return x if out is x.local else x.like(out)


def without_reduction(func: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function element by element."""
    return functools.wraps(func)(lambda *args, **kwargs: func(*args, reduction="none", **kwargs))
