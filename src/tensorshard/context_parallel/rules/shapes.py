"""Other shapes, and tensors one after the other, side by side, and with padding."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from tensorshard.context_parallel.layout_changes import on_meta, part_of, turned
from tensorshard.context_parallel.layouts import at_rank, contiguous, expanded, factored, joined
from tensorshard.context_parallel.rule_table import Signature, name_of, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor, note_copy

_PAD = Signature(lambda input, pad, mode="constant", value=None: 0)
_SHORT = 8
"""A plain piece with fewer positions than this many for each rank goes to one rank."""


@rule("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")
def shapes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A reshape of any kind."""
    x = args[0]
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    dtype = next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.dtype)), None)
    if dtype is not None:  # the same bytes, seen as another type
        if x.split_dim == x.ndim - 1 and dtype.itemsize != x.dtype.itemsize:
            return NotImplemented
        return x.like(x.local.view(dtype))
    new = _new_shape(func, x, args, kwargs)
    result = reshaped(x, new)
    if result is not NotImplemented:
        return result
    for dim in range(x.ndim):  # the positions are mixed with others; another dimension may stay as it is
        if _stays_whole(x.shape, dim, new):
            y = turned(x, [other for other in range(x.ndim) if other != dim], "reshape")
            if y is not None:
                return note_copy(x, reshaped(y, new))
    return NotImplemented


def _new_shape(func: Callable[..., Any], x: SequenceTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    name = name_of(func)
    if name in ("view", "reshape") and not kwargs:
        given = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
        new = [int(size) for size in given]
    elif name == "unsqueeze" and len(args) == 2 and not kwargs:
        new = list(x.shape)
        new.insert(args[1] if args[1] >= 0 else x.ndim + 1 + args[1], 1)
    else:
        new = list(func(*on_meta(tuple(args)), **on_meta(kwargs)).shape)
    if -1 in new:
        new[new.index(-1)] = x.numel() // max(1, -math.prod(new))
    if math.prod(new) != x.numel():
        raise RuntimeError(f"shape '{new}' is invalid for input of size {x.numel()}")
    return new


def reshaped(x: SequenceTensor, new: Sequence[int]) -> Any:
    """`x` in the shape `new`, if its positions stay together; else NotImplemented."""
    rank, size = x.group.rank, x.group.size
    outer, root, inner = x.sequence.root
    before, after = math.prod(x.shape[: x.split_dim]) * outer, math.prod(x.shape[x.split_dim + 1 :]) * inner
    for dim, length in enumerate(new):
        leading, trailing = math.prod(new[:dim]), math.prod(new[dim + 1 :])
        if not leading or not trailing or before % leading or after % trailing:
            continue
        if length == before // leading * root.length * (after // trailing):
            layout = expanded(root, before // leading, after // trailing)
            if any(
                held * leading * trailing != part * (x.numel() // x.sequence.length)
                for held, part in zip(layout.sizes, x.sequence.sizes, strict=True)
            ):
                break
            shape = [*new[:dim], layout.sizes[rank], *new[dim + 1 :]]
            return SequenceTensor(x.local.reshape(shape), dim, layout, x.group)
    before, after = math.prod(x.shape[: x.split_dim]), math.prod(x.shape[x.split_dim + 1 :])
    for dim in range(len(new) - 1):
        rows, columns = new[dim], new[dim + 1]
        is_here = math.prod(new[:dim]) == before and math.prod(new[dim + 2 :]) == after
        if rows * columns == x.sequence.length and rows > 1 and columns > 1 and is_here:
            factorization = factored(x.sequence, rows, columns)
            if factorization is None and rows < size:
                break
            at, layout = factorization or (0, contiguous(rows, size))
            flat = expanded(layout, rows, 1) if at else expanded(layout, 1, columns)
            local = part_of(x, x.split_dim, flat, "chunks", x.group)
            shape = list(new)
            shape[dim + at] = layout.sizes[rank]
            result = SequenceTensor(local.reshape(shape), dim + at, layout, x.group)
            return result if local is x.local else note_copy(x, result)
    return NotImplemented


def _stays_whole(shape: Sequence[int], dim: int, new: Sequence[int]) -> bool:
    """Whether a reshape leaves the dimension `dim` as it is."""
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    return any(
        length == shape[dim] and math.prod(new[:at]) == before and math.prod(new[at + 1 :]) == after
        for at, length in enumerate(new)
    )


@rule("transpose")
def transpose(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Two dimensions are exchanged."""
    if len(args) != 3 or kwargs or not isinstance(args[1], int):
        return moves(func, args, kwargs)
    x, first, second = args
    ndim = len(x._whole_shape)
    first, second, dim = first % ndim, second % ndim, x.split_dim
    dim = second if dim == first else first if dim == second else dim
    return SequenceTensor(func(x.local, first, second), dim, x.sequence, x.group)


@rule("permute", "movedim", "swapaxes", "swapdims", "t", "T", "mT", "moveaxis", "H", "mH", "adjoint")
def moves(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dimensions change their places."""
    x, rest = (args[0], args[1:]) if args else (kwargs["input"], ())
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    probe = torch.empty(tuple(range(2, x.ndim + 2)), device="meta")
    dim = list(func(probe, *rest, **kwargs).shape).index(x.split_dim + 2)
    return SequenceTensor(func(x.local, *rest, **kwargs), dim, x.sequence, x.group)


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def expands(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copies along dimensions."""
    if len(args) < 2 or kwargs or not isinstance(args[0], SequenceTensor):
        return NotImplemented
    x, name, from_end = args[0], name_of(func), args[0].split_dim - args[0].ndim
    if isinstance(args[1], torch.Tensor):
        sizes = list(args[1].shape)
    else:
        sizes = [int(size) for size in (args[1] if isinstance(args[1], tuple | list) else args[1:])]
    if name in ("repeat", "tile"):
        if len(sizes) < -from_end:
            return NotImplemented
        out = x.local.repeat(sizes) if name == "repeat" else x.local.tile(sizes)
        return SequenceTensor(out, out.ndim + from_end, expanded(x.sequence, sizes[from_end], 1), x.group)
    if sizes[from_end] not in (-1, x.sequence.length):
        return NotImplemented
    sizes[from_end] = x.sequence.sizes[x.group.rank] if x.ndim <= len(sizes) else -1
    out = x.local.expand(sizes)
    return SequenceTensor(out, out.ndim + from_end, x.sequence, x.group)


@rule("chunk", "split", "unbind", "tensor_split", "split_with_sizes", "__iter__")
def splits(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Several slices."""
    x, name = args[0], name_of(func)
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    if name == "__iter__":
        return iter(torch.unbind(x, 0))
    position = 1 if name == "unbind" else 2
    dim = kwargs.get("dim", args[position] if len(args) > position else 0) % x.ndim
    if dim != x.split_dim:
        if any(isinstance(arg, SequenceTensor) for arg in args[1:]):
            return NotImplemented
        out = func(x.local, *args[1:], **kwargs)
        at = x.split_dim - (name == "unbind" and dim < x.split_dim)
        return type(out)(SequenceTensor(each, at, x.sequence, x.group) for each in out)
    before = (slice(None),) * dim
    if name == "unbind":
        return tuple(x[(*before, position)] for position in range(x.shape[dim]))
    sizes = [each.shape[dim] for each in func(on_meta(x), *args[1:], **kwargs)]
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(x[(*before, slice(stop - size, stop))] for size, stop in zip(sizes, stops, strict=True))


@rule("cat", "concat", "concatenate")
def cat(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tensors one after the other."""
    given = args[0] if args else kwargs.get("tensors")
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    if not isinstance(given, list | tuple) or kwargs.get("out") is not None or not isinstance(dim, int):
        return NotImplemented
    if _are_alike(given) and dim % given[0].ndim != given[0].split_dim:  # the usual case
        return given[0].like(torch.cat([tensor.local for tensor in given], dim))
    # torch ignores empty tensors of one dimension
    tensors = [t for t in given if t.ndim != 1 or t.numel() or all(other.ndim == 1 for other in given)]
    lead = _lead(tensors)
    if any(tensor.ndim != lead.ndim for tensor in tensors):
        return NotImplemented
    dim = dim % lead.ndim
    group = lead.group
    if dim != lead.split_dim:
        parts = [part_of(tensor, lead.split_dim, lead.sequence, "cat", group) for tensor in tensors]
        return lead.like(torch.cat(parts, dim))
    layouts, parts, has_begun = [], [], False
    for tensor in tensors:
        length = tensor.shape[dim]
        if isinstance(tensor, SequenceTensor) and tensor.split_dim == dim:
            layout, has_begun = tensor.sequence, True
        elif length >= _SHORT * group.size:
            layout = contiguous(length, group.size)
        else:
            layout = at_rank(length, group.size - 1 if has_begun else 0, group.size)
        layouts.append(layout)
        parts.append(part_of(tensor, dim, layout, "cat", group))
    return SequenceTensor(torch.cat(parts, dim), dim, joined(tuple(layouts)), group)


def _are_alike(tensors: Sequence[Any]) -> bool:
    """Whether all are sequence tensors of one layout."""
    first = tensors[0] if tensors else None
    return type(first) is SequenceTensor and all(
        type(each) is SequenceTensor
        and each.sequence is first.sequence
        and each.split_dim == first.split_dim
        and len(each._whole_shape) == len(first._whole_shape)
        for each in tensors
    )


@rule("stack")
def stack(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tensors side by side."""
    tensors = args[0] if args else kwargs.get("tensors")
    if not isinstance(tensors, list | tuple) or kwargs.get("out") is not None:
        return NotImplemented
    lead = _lead(tensors)
    if any(tensor.shape != lead.shape for tensor in tensors):
        return NotImplemented
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % (lead.ndim + 1)
    parts = [part_of(tensor, lead.split_dim, lead.sequence, "stack", lead.group) for tensor in tensors]
    return SequenceTensor(torch.stack(parts, dim), lead.split_dim + (dim <= lead.split_dim), lead.sequence, lead.group)


def _lead(tensors: Sequence[torch.Tensor]) -> SequenceTensor:
    return max((t for t in tensors if isinstance(t, SequenceTensor)), key=lambda t: (t.sequence.is_home, t.numel()))


@rule("pad")
def pad(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Constant values around. Negative amounts cut off."""
    call = _PAD.bind(args, kwargs)
    if call is None or call["mode"] != "constant" or not isinstance(call["input"], SequenceTensor):
        return NotImplemented
    x, amounts, value = call["input"], list(call["pad"]), call["value"]
    at = 2 * (x.ndim - 1 - x.split_dim)
    if at >= len(amounts):
        return x.like(F.pad(x.local, amounts, value=value))
    left, right = amounts[at : at + 2]
    amounts[at : at + 2] = [0, 0]
    if any(amounts):
        x = x.like(F.pad(x.local, amounts, value=value))
    dim, y = x.split_dim, cast(torch.Tensor, x)
    if min(left, right) < 0:
        kept = slice(max(0, -left), x.sequence.length - max(0, -right))
        y = x[(*(slice(None),) * dim, kept)]

    def filler(count: int) -> torch.Tensor:
        shape = [count if each == dim else size for each, size in enumerate(x.shape)]
        return torch.full(shape, value or 0, dtype=x.dtype, device=x.device)

    pieces = [*([filler(left)] if left > 0 else []), y, *([filler(right)] if right > 0 else [])]
    if len(pieces) == 1:
        return y.clone()
    return torch.cat(pieces, dim)
