"""Tensors one after the other, side by side, and with padding."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from tensorshard.context_parallel.layout_changes import part_of
from tensorshard.context_parallel.layouts import at_rank, contiguous, joined
from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_PAD = Signature(lambda input, pad, mode="constant", value=None: 0)
_SHORT = 8
"""A plain piece with fewer positions than this many for each rank goes to one rank."""


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
    found, parts, has_begun = [], [], False
    for tensor in tensors:
        length = tensor.shape[dim]
        if isinstance(tensor, SequenceTensor) and tensor.split_dim == dim:
            layout, has_begun = tensor.sequence, True
        elif length >= _SHORT * group.size:
            layout = contiguous(length, group.size)
        else:
            layout = at_rank(length, group.size - 1 if has_begun else 0, group.size)
        found.append(layout)
        parts.append(part_of(tensor, dim, layout, "cat", group))
    return SequenceTensor(torch.cat(parts, dim), dim, joined(tuple(found)), group)


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
