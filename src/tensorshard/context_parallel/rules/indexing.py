"""Reading and writing by index, lookups in tables, and tokens to experts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import arange  # torch.arange itself is replaced while a group is active

from tensorshard.context_parallel import layouts
from tensorshard.context_parallel.exchanges import fetch, take, turn
from tensorshard.context_parallel.layout_changes import (
    aligned,
    gathered,
    is_gathered,
    part_of,
    sequence_or_whole,
    turned,
)
from tensorshard.context_parallel.layouts import PositionLists, runs_of
from tensorshard.context_parallel.rule_table import Signature, name_of, rule
from tensorshard.context_parallel.rules.pointwise import leading
from tensorshard.context_parallel.sequence_tensor import SequenceTensor, note_copy, note_piece

_FULL = slice(None)
_READS_BEFORE_TURN = 2
_READS_BEFORE_GATHER = 3
_SMALL = 64
"""A tensor with so few numbers for each position of a sample is gathered where positions are read one by one. Split
along these numbers, every operation that sums over them would be an exchange of its own."""
_EMBEDDING = Signature(
    lambda input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False: 0
)
_GROUPED = Signature(lambda a, b, offs=None, bias=None, out_dtype=None: 0)
_GROUPED_NAMES = {"mat_a": "a", "mat_b": "b", "input": "a", "weight": "b", "mat2": "b", "self": "a"}


@rule("__getitem__")
def getitem(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x[index]``."""
    x, index = args
    entries = normalized(index, x.ndim)
    if entries is None:
        return NotImplemented
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    if tensors:
        return _by_tensors(x, entries, tensors)
    return _by_slices(x, index, entries)


def normalized(index: Any, ndim: int) -> list[Any] | None:
    """The entries of an index for all dimensions, without an ellipsis; None for kinds that rules do not know."""
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = [torch.as_tensor(entry) if isinstance(entry, list | np.ndarray) else entry for entry in entries]
    for i, entry in enumerate(entries):
        if isinstance(entry, bool) or (isinstance(entry, torch.Tensor) and entry.dtype == torch.uint8):
            return None
        if isinstance(entry, np.integer):
            entries[i] = int(entry)
        if isinstance(entry, torch.Tensor) and entry.ndim == 0:
            if entry.dtype == torch.bool or entry.is_floating_point():
                return None
            if not isinstance(entry, SequenceTensor):
                entries[i] = int(entry)
    taken = sum(_width(entry) for entry in entries if entry is not Ellipsis)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    return entries[:at] + [_FULL] * (ndim - taken) + entries[at + 1 :]


def _width(entry: Any) -> int:
    """How many dimensions an entry takes."""
    if entry is None:
        return 0
    return entry.ndim if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool else 1


def _is_full(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == _FULL


# By tensors


def _by_tensors(x: torch.Tensor, entries: list[Any], tensors: list[torch.Tensor]) -> Any:
    if any(isinstance(entry, int) for entry in entries):  # torch takes these before the tensors
        numbers = [[entry] if isinstance(entry, int) else [_FULL] * _width(entry) for entry in entries]
        y = x[tuple(entry for each in numbers for entry in each)]
        return y[tuple(entry for entry in entries if not isinstance(entry, int))]
    first = entries[0]
    if len(tensors) == 1 and tensors[0] is first and first.dtype == torch.bool and all(map(_is_full, entries[1:])):
        return _by_leading_mask(x, first)
    has_masks = any(tensor.dtype == torch.bool for tensor in tensors)
    if has_masks and (len(tensors) > 1 or not isinstance(x, SequenceTensor) or tensors[0].ndim > 1):
        return NotImplemented
    if isinstance(x, SequenceTensor):
        if entries[-1] is None:
            y = _by_tensors(x, entries[:-1], tensors)
            return y if y is NotImplemented else y.unsqueeze(-1)
        result = _of_sequence(x, entries, tensors)
        if result is not NotImplemented or not any(isinstance(tensor, SequenceTensor) for tensor in tensors):
            return result
        x = gathered(x, "index")
    return _of_plain(x, entries)


def _by_leading_mask(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """``x[mask]``: rows of the flattened leading dimensions."""
    if not isinstance(x, SequenceTensor) or x.split_dim >= mask.ndim:
        if not isinstance(x, SequenceTensor):
            return NotImplemented
        whole_mask = gathered(mask, "mask")
        return SequenceTensor(x.local[whole_mask], x.split_dim - mask.ndim + 1, x.sequence, x.group)
    if mask.shape != x.shape[: mask.ndim]:
        return NotImplemented
    flat = x.flatten(0, mask.ndim - 1) if mask.ndim > 1 else x
    if not isinstance(flat, SequenceTensor) or flat.split_dim != 0:
        return NotImplemented
    return take_positions(flat, gathered(mask, "mask").flatten())


def _of_plain(x: torch.Tensor, entries: list[Any]) -> Any:
    """A plain tensor at positions that are given by sequence tensors."""
    given = [entry for entry in entries if isinstance(entry, SequenceTensor)]
    if any(entry.dtype == torch.bool for entry in entries if isinstance(entry, torch.Tensor)):
        return NotImplemented
    lead = leading(given)
    places = [i for i, entry in enumerate(entries) if isinstance(entry, torch.Tensor)]
    ndim = max(entry.ndim for entry in entries if isinstance(entry, torch.Tensor))
    local = [aligned(entry, lead, "index") if isinstance(entry, torch.Tensor) else entry for entry in entries]
    are_adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if are_adjacent else 0
    return SequenceTensor(x[tuple(local)], start + ndim + lead.split_dim - lead.ndim, lead.sequence, lead.group)


def _of_sequence(x: SequenceTensor, entries: list[Any], tensors: list[torch.Tensor]) -> Any:
    """Indices that are tensors, of a sequence tensor."""
    if any(isinstance(tensor, SequenceTensor) for tensor in tensors):
        return NotImplemented
    at = _entry_of(entries, x.split_dim)
    entry, others = entries[at], [*entries[:at], _FULL, *entries[at + 1 :]]
    if len(tensors) == 1:
        if entry is tensors[0]:
            if entry.ndim != 1:
                return NotImplemented
            return _rest(take_positions(x, entry), others)
        return _rest(narrow_to(x, entry), others) if isinstance(entry, slice) else NotImplemented
    advanced = [i for i, each in enumerate(entries) if isinstance(each, torch.Tensor)]
    are_adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    if any(each.dtype == torch.bool for each in tensors) or any(each is None for each in entries):
        return NotImplemented
    if isinstance(entry, slice):
        y = narrow_to(x, entry)
        if not isinstance(y, SequenceTensor):
            return y[tuple(others)]
        ndim = max(each.ndim for each in tensors)
        before = sum(i < at for i in advanced)
        start = advanced[0] if are_adjacent else 0
        dim = at - before + ndim if not are_adjacent or start < at else at
        return SequenceTensor(y.local[tuple(others)], dim, y.sequence, y.group)
    lengths = {len(each) for each in tensors if each.ndim == 1}
    if not isinstance(entry, torch.Tensor) or any(each.ndim != 1 for each in tensors) or len(lengths) != 1:
        return NotImplemented
    if not are_adjacent:
        return NotImplemented
    positions = _host(entry) % x.sequence.length
    if _are_few(positions, x):
        wanted = PositionLists([runs_of(positions)] * x.group.size)
        fetched = fetch(x.local, x.split_dim, x.sequence, wanted, "index", x.group)
        return fetched[(*entries[:at], arange(len(positions), device=x.device), *entries[at + 1 :])]
    layout, places = layouts.selected(x.sequence, positions)
    mine = layout.index(x.group.rank)
    local: list[Any] = []
    for i, each in enumerate(entries):
        if i == at:
            local.append(places.places(x.group.rank).on(x.device))
        else:
            local.append(take(each, 0, mine) if isinstance(each, torch.Tensor) else each)
    return SequenceTensor(x.local[tuple(local)], advanced[0], layout, x.group)


def _are_few(positions: np.ndarray[Any, Any], x: SequenceTensor) -> bool:
    """Whether every rank gets all of these positions, instead of keeping its own of them."""
    return len(positions) < 2 * x.group.size or len(positions) * 4 < x.sequence.length


def _host(index: torch.Tensor) -> np.ndarray[Any, Any]:
    return index.detach().cpu().numpy()


def _entry_of(entries: list[Any], dim: int) -> int:
    """Which entry takes the dimension `dim`."""
    last = -1
    for i, entry in enumerate(entries):
        last += _width(entry)
        if last >= dim:
            return i
    raise IndexError(f"too few indices for dimension {dim}")


def take_positions(x: SequenceTensor, index: torch.Tensor) -> torch.Tensor:
    """The positions that a plain list names, or a mask selects. Nothing moves if they are many."""
    if index.dtype in (torch.bool, torch.uint8):
        positions = np.flatnonzero(_host(index))
    else:
        positions = _host(index).astype(np.int64)
        if len(positions) and (positions.max() >= x.sequence.length or positions.min() < -x.sequence.length):
            raise IndexError(f"index out of range for a dimension of size {x.sequence.length}")
        positions = positions % x.sequence.length
    if _are_few(positions, x):
        wanted = PositionLists([runs_of(positions)] * x.group.size)
        return fetch(x.local, x.split_dim, x.sequence, wanted, "index", x.group)
    layout, places = layouts.selected(x.sequence, positions)
    local = _copied(take(x.local, x.split_dim, places.index(x.group.rank)), places.index(x.group.rank))
    return SequenceTensor(local, x.split_dim, layout, x.group)


def _copied(local: torch.Tensor, index: Any) -> torch.Tensor:
    return local.clone() if isinstance(index, slice) else local


# By slices and numbers


def _by_slices(x: Any, index: Any, entries: list[Any]) -> Any:
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    at = _entry_of(entries, x.split_dim)
    entry = entries[at]
    if isinstance(entry, int):
        return _at_position(x, index, entries, at)
    y = narrow_to(x, entry)
    result = _rest(y, [*entries[:at], _FULL, *entries[at + 1 :]])
    return result if isinstance(y, SequenceTensor) else note_piece(x, index, result)


def _rest(y: torch.Tensor, entries: list[Any]) -> Any:
    """The other dimensions' entries, after that of the positions was done."""
    if all(map(_is_full, entries)):
        return y
    if not isinstance(y, SequenceTensor):
        return y[tuple(entries)]
    at = _entry_of(entries, y.split_dim)
    made = 0
    for entry in entries[:at]:
        if isinstance(entry, torch.Tensor):
            made += 1 if entry.dtype == torch.bool else entry.ndim
        else:
            made += not isinstance(entry, int)
    result = SequenceTensor(y.local[tuple(entries)], made, y.sequence, y.group)
    result._copied_from = y._copied_from
    return result


def _at_position(x: SequenceTensor, index: Any, entries: list[Any], at: int) -> Any:
    """One position: fetched. Where many are read one by one, all are fetched, or the tensor is split elsewhere."""
    length = x.sequence.length
    if not -length <= entries[at] < length:
        raise IndexError(f"index {entries[at]} is out of bounds for dimension {x.split_dim} with size {length}")
    position = entries[at] % length
    x._reads += 1
    is_small = x.split_dim > 0 and x.numel() <= _SMALL * x.shape[0] * length
    if x._reads > _READS_BEFORE_TURN and not is_gathered(x) and not is_small:
        if x._turned is None or x._turned[1] != x.version:
            x._turned = turned(x, (), "positions one by one"), x.version
        if x._turned[0] is not None:
            return note_copy(x, x._turned[0][index])
    if x._reads > (_READS_BEFORE_TURN if is_small else _READS_BEFORE_GATHER) or is_gathered(x):
        return gathered(x, "position")[tuple(entries)]
    wanted = PositionLists([np.array([[position, position + 1]])] * x.group.size)
    piece = fetch(x.local, x.split_dim, x.sequence, wanted, "position", x.group)
    return note_piece(x, index, piece[(*entries[:at], 0, *entries[at + 1 :])])


def narrow_to(x: SequenceTensor, entry: slice) -> torch.Tensor:
    """The positions of a slice."""
    start, stop, step = entry.indices(x.sequence.length)
    if (start, stop, step) == (0, x.sequence.length, 1):
        return x
    layout, places = layouts.narrowed(x.sequence, start, max(start, stop), step)
    index = places.index(x.group.rank)
    result = sequence_or_whole(take(x.local, x.split_dim, index), x.split_dim, layout, x.group)
    return result if isinstance(index, slice) else note_copy(x, result)


@rule("select")
def select(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.select(dim, index)``."""
    given = [*args[1:], *kwargs.values()]
    if len(given) != 2 or set(kwargs) - {"dim", "index"} or not isinstance(args[0], SequenceTensor):
        return NotImplemented
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    index = kwargs.get("index", args[2] if len(args) > 2 else 0)
    return args[0][(*(_FULL,) * (dim % args[0].ndim), index)]


@rule("narrow")
def narrow(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.narrow(dim, start, length)``."""
    if kwargs or len(args) != 4 or not isinstance(args[0], SequenceTensor) or name_of(func) != "narrow":
        return NotImplemented
    x, dim, start, length = args
    start = int(start)
    start += x.shape[dim] if start < 0 else 0
    if start + length > x.shape[dim]:
        return NotImplemented
    return x[(*(_FULL,) * (dim % x.ndim), slice(start, start + length))]


@rule("flip", "roll")
def reordered(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The positions in another order stay where they are."""
    x, name = args[0], name_of(func)
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    if name == "flip":
        dims = kwargs["dims"] if "dims" in kwargs else args[1] if isinstance(args[1], tuple | list) else args[1:]
        dims = [dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)]
        local = x.local.flip(dims)
        if x.split_dim not in dims:
            return x.like(local)
        rest = [dim for dim in dims if dim != x.split_dim]
        local = x.local.flip(rest) if rest else x.local
        order = np.arange(x.sequence.length)[::-1]
    else:
        call = {**dict(zip(("input", "shifts", "dims"), args, strict=False)), **kwargs}
        shift, dim = (_only(call.get(key)) for key in ("shifts", "dims"))
        if not isinstance(dim, int):
            return NotImplemented
        if dim % x.ndim != x.split_dim:
            return x.like(torch.roll(x.local, shift, dim))
        local = x.local
        order = np.roll(np.arange(x.sequence.length), shift)
    layout, places = layouts.selected(x.sequence, order)
    index = places.index(x.group.rank)
    return SequenceTensor(_copied(take(local, x.split_dim, index), index), x.split_dim, layout, x.group)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) and len(value) == 1 else value


@rule("index_select")
def index_select(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.index_select(dim, index)``."""
    call = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    x, dim, index = call.get("input"), call.get("dim"), call.get("index")
    if not isinstance(index, torch.Tensor) or index.ndim != 1 or not isinstance(dim, int) or "out" in call:
        return NotImplemented
    assert isinstance(x, torch.Tensor)
    return x[(*(_FULL,) * (dim % x.ndim), index)]  # type: ignore[index]


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
    places = kept.places(rank).on(x.device)
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
    place = places.places(x.group.rank).on(x.device)
    out = func(x.local, x.split_dim, place, part_of(source, x.split_dim, layout, name_of(func), x.group))
    return x if out is x.local else x.like(out)


@rule("embedding")
def embedding(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table. (``torch.embedding`` has the table first.)"""
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return NotImplemented
    call = _EMBEDDING.bind(args, kwargs)
    if call is None or call["max_norm"] is not None or call["scale_grad_by_freq"]:
        return NotImplemented
    ids, weight = call["input"], call["weight"]
    if not isinstance(ids, SequenceTensor) or isinstance(weight, SequenceTensor):
        return NotImplemented
    return ids.like(func(ids.local, weight, padding_idx=call["padding_idx"], sparse=call["sparse"]))


@rule("one_hot")
def one_hot(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One of a known number of classes."""
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    x = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    if classes == -1 or not isinstance(x, SequenceTensor):
        return NotImplemented
    return x.like(func(x.local, classes))


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def grouped_mm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Rows that are sorted by expert, times each expert's matrix. Each rank multiplies its own rows."""
    call = _GROUPED.bind(args, {_GROUPED_NAMES.get(key, key): value for key, value in kwargs.items()})
    if call is None or call["bias"] is not None or not isinstance(call["offs"], torch.Tensor):
        return NotImplemented
    a, b, offsets = call["a"], call["b"], call["offs"]
    if not isinstance(a, SequenceTensor) or a.ndim != 2 or a.split_dim != 0:
        return NotImplemented
    if isinstance(b, SequenceTensor) or isinstance(offsets, SequenceTensor):
        return NotImplemented
    if not all((np.diff(a.sequence.positions(rank)) > 0).all() for rank in range(a.group.size)):
        return NotImplemented
    mine = a.sequence.places(a.group.rank).on(offsets.device)
    own = torch.searchsorted(mine, offsets.to(mine.dtype)).to(offsets.dtype)
    options = {} if call["out_dtype"] is None else {"out_dtype": call["out_dtype"]}
    return a.like(func(a.local, b, offs=own, **options))
