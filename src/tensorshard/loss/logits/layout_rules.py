"""What reshapes, permutations and indexing do to a dimension that is split over ranks.

Each rule takes a tensor's full shape and its split dimension. It returns how to do the operation on this rank's shard,
and which dimension is split afterwards; None if the operation would cut the split dimension or merge it with others.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


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
