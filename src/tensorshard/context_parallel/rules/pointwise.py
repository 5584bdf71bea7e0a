"""Element by element: local, once all tensors have one layout. Arithmetic, copies and casts, random numbers."""

import functools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tensorshard.context_parallel.exchanges import take
from tensorshard.context_parallel.layout_changes import aligned, cut_for, map_tensors, on_meta, sequence_tensors
from tensorshard.context_parallel.layouts import Places, SequenceLayout
from tensorshard.context_parallel.rule_table import Signature, name_of, rule, writes
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_ACTIVATIONS = (
    "relu", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "mish", "celu", "selu", "hardshrink",
    "softshrink",
)  # fmt: skip
_OTHERS = (
    "softplus", "hardtanh", "relu6", "prelu", "logsigmoid", "softsign", "tanhshrink", "hardsigmoid", "hardswish",
    "threshold",
)  # fmt: skip
_CASTS = (
    "float", "double", "half", "bfloat16", "int", "long", "bool", "short", "byte", "char", "type", "cfloat",
    "cdouble",
)  # fmt: skip
_COPIES = (
    "contiguous", "resolve_conj", "resolve_neg", "clone", "detach", "cpu", "cuda", "data",
    "alias", "__copy__", "requires_grad_", "pin_memory",
)  # fmt: skip
_FILLED = ["zeros_like", "ones_like", "full_like", "empty_like"]
_DROPOUT = Signature(lambda input, p=0.5, training=True, inplace=False: 0)
_TORCH_DROPOUT = Signature(lambda input, p, train: 0)


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


@rule("dropout")
def dropout(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Each position has its own random zeros."""
    call = _TORCH_DROPOUT.bind(args, kwargs) if "train" in kwargs else _DROPOUT.bind(args, kwargs)
    if call is None or call.get("inplace") or name_of(func) != "dropout":
        return NotImplemented
    x, p = call["input"], call["p"]
    if not call.get("training", call.get("train")) or p == 0:
        return x
    if not isinstance(x, SequenceTensor) or not 0 < p < 1:
        return NotImplemented
    # What torch multiplies by: 0, or 1 / (1 - p).
    noise = _draw_whole(x, lambda whole: whole.bernoulli_(1 - p))
    return x * cut_for(noise.div_(1 - p), x.split_dim, x.sequence, x.group)


def _draw_whole(x: SequenceTensor, draw: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `draw` returns for an empty tensor such as the whole of `x`. Of a sequence that tensor-parallel ranks share,
    it is drawn for all of them, and has the positions of this rank's share."""
    outer, layout, inner = x.sequence.root
    shape, dtype, device = list(x.shape), x.dtype, x.device
    length = layout.length if layout.origin is None else layout.origin.length
    shape[x.split_dim] = outer * length * inner
    drawn: torch.Tensor = x.group.draw(lambda: draw(torch.empty(shape, dtype=dtype, device=device)))
    if layout.of_origin is None:
        return drawn
    return take(drawn, x.split_dim, _of_share(layout, outer, length, inner))


@lru_cache(64)
def _of_share(layout: SequenceLayout, outer: int, length: int, inner: int) -> Places:
    """Which of the places [outer, length, inner], flattened, those of a share are."""
    assert layout.of_origin is not None
    places = np.arange(outer)[:, None, None] * length + layout.of_origin[:, None]
    return Places((places * inner + np.arange(inner)).reshape(-1))


@rule("alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout", "rrelu")
def other_dropouts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Drawn and computed on whole tensors."""
    name = name_of(func)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 and name != "rrelu" else None))
    if training is False and name != "rrelu" and isinstance(args[0], SequenceTensor):
        return args[0]
    return NotImplemented


@rule("rand_like", "randn_like", "randint_like")
def like(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """New random numbers of the same shape."""
    x = args[0]
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    whole = _draw_whole(x, lambda whole: func(whole, *args[1:], **kwargs))
    return cut_for(whole, x.split_dim, x.sequence, x.group)


@rule("bernoulli", "normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal", "multinomial")
def drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Written in place: drawn whole. Others fall back, where all ranks draw the same whole tensor."""
    x = args[0]
    if not writes(name_of(func)) or not isinstance(x, SequenceTensor):
        return NotImplemented
    if any(isinstance(arg, torch.Tensor) for arg in (*args[1:], *kwargs.values())):
        return NotImplemented
    whole = _draw_whole(x, lambda whole: func(whole, *args[1:], **kwargs))
    with torch.no_grad():
        x.local.copy_(take(whole, x.split_dim, x.sequence.index(x.group.rank)))
    return x


def attention_dropout(weights: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout of attention's weights."""
    return F.dropout(weights, p, training=True)
