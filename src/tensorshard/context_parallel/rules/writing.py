"""Writing by index."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tensorshard.context_parallel import layouts
from tensorshard.context_parallel.exchanges import turn
from tensorshard.context_parallel.layout_changes import gathered, part_of
from tensorshard.context_parallel.rule_table import name_of, rule
from tensorshard.context_parallel.rules.indexing import normalized
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_FULL = slice(None)


@rule("__setitem__")
def setitem(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x[index] = value``, for slices and numbers."""
    x, index, value = args
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    entries = normalized(index, x.ndim)
    if entries is None or any(isinstance(entry, torch.Tensor) or entry is None for entry in entries):
        return NotImplemented
    _follow(x, entries, value)
    if entries[x.split_dim] == _FULL:
        _write_beside(x, entries, value)
    else:
        _write_positions(x, entries, value)
    return None


def _follow(x: SequenceTensor, entries: list[Any], value: Any) -> None:
    """Where each position is written with a value that is split along another dimension, `x` is split along that one
    from now on: this is a loop over positions."""
    if not isinstance(value, SequenceTensor) or not all(isinstance(e, int) or e == _FULL for e in entries):
        return
    kept = [dim for dim in range(x.ndim) if isinstance(entries[dim], slice)]
    if len(kept) != value.ndim or x.split_dim in kept or value.shape != torch.Size([x.shape[dim] for dim in kept]):
        return
    dim = kept[value.split_dim]
    x.local = turn(x.local, x.split_dim, x.sequence, dim, value.sequence, "write: turn", x.group)
    x.split_dim, x.sequence = dim, value.sequence
    x._gathered = x._turned = None


def _write_beside(x: SequenceTensor, entries: list[Any], value: Any) -> None:
    """All positions are written."""
    if isinstance(value, torch.Tensor):
        from_end = x.split_dim - x.ndim + sum(isinstance(entry, int) for entry in entries[x.split_dim + 1 :])
        has = value.ndim >= -from_end and value.shape[from_end] == x.sequence.length
        value = part_of(value, value.ndim + from_end if has else None, x.sequence, "write", x.group)
    x.local[tuple(entries)] = value


def _write_positions(x: SequenceTensor, entries: list[Any], value: Any) -> None:
    """Some positions are written. A rank that has none of them still has the write in its graph."""
    rank, entry = x.group.rank, entries[x.split_dim]
    if isinstance(entry, int):
        if not -x.sequence.length <= entry < x.sequence.length:
            raise IndexError(
                f"index {entry} is out of bounds for dimension {x.split_dim} with size {x.sequence.length}"
            )
        entry = slice(entry % x.sequence.length, entry % x.sequence.length + 1)
    start, stop, step = entry.indices(x.sequence.length)
    layout, kept = layouts.narrowed(x.sequence, start, max(start, stop), step)
    places = torch.from_numpy(np.ascontiguousarray(kept.positions(rank))).to(x.device)
    view = x.local[tuple(_FULL if dim == x.split_dim else each for dim, each in enumerate(entries))]
    dim = x.split_dim - sum(isinstance(each, int) for each in entries[: x.split_dim])
    if not isinstance(value, torch.Tensor):
        view.index_fill_(dim, places, value)
        return
    if isinstance(entries[x.split_dim], int):
        value = gathered(value, "write")
        if value.ndim >= view.ndim - dim:
            value = value.unsqueeze(dim - view.ndim)
    at = value.ndim - view.ndim + dim
    has = at >= 0 and value.shape[at] == layout.length
    value = part_of(value, at if has else None, layout, "write", x.group)
    shape = list(view.shape)
    shape[dim] = len(places)
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    view.index_copy_(dim, places, value.to(view.dtype).expand(shape))


@rule("index_add")
def index_add(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Each row is added by the rank that holds its position."""
    if kwargs or len(args) != 4:
        return NotImplemented
    x, dim, index, source = args
    if not isinstance(x, SequenceTensor) or isinstance(index, SequenceTensor) or dim % x.ndim != x.split_dim:
        return NotImplemented
    positions = index.detach().cpu().numpy()
    layout, places = layouts.selected(x.sequence, positions)
    place = torch.from_numpy(places.positions(x.group.rank)).to(x.device)
    out = func(x.local, x.split_dim, place, part_of(source, x.split_dim, layout, name_of(func), x.group))
    return x if out is x.local else x.like(out)
