"""Layers that look at other positions: windows fetch their neighbours, and recurrent layers hand on a state."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tensorshard.context_parallel import layouts
from tensorshard.context_parallel.exchanges import fetch, stack_ranks, take, tie
from tensorshard.context_parallel.layout_changes import part_of
from tensorshard.context_parallel.layouts import PositionLists, SequenceLayout, elsewhere
from tensorshard.context_parallel.rule_table import Signature, name_of, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor, note_copy
from tensorshard.torch_private.pytree import tree_tensors

_CONVOLUTION = Signature(lambda input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1: 0)
_POOL = Signature(lambda input, kernel_size, stride=None, padding=0: 0)


@lru_cache(256)
def _windows(
    layout: SequenceLayout, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[SequenceLayout, PositionLists, list[tuple[int, int]]] | None:
    """The layout of the windows, the positions that each rank's windows see, and how many beyond both ends; None if a
    rank has no window."""
    length = layout.length
    count = (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if count < 1:
        return None
    source = layout if layout.is_ordered else layouts.contiguous(length, layout.ranks)
    windows, _ = layouts.selected(source, np.clip(np.arange(count) * stride, 0, length - 1))
    if not windows.is_full_everywhere:
        return None
    wanted, beyond = [], []
    for rank in range(layout.ranks):
        own = windows.positions(rank)
        first = int(own[0]) * stride - padding
        last = int(own[-1]) * stride - padding + dilation * (kernel - 1)
        wanted.append(np.array([[max(0, first), max(0, first, min(length, last + 1))]]))
        beyond.append((max(0, -first), max(0, last + 1 - max(length, first))))
    return windows, PositionLists(wanted), beyond


def _with_halo(
    x: SequenceTensor, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[torch.Tensor, SequenceLayout] | None:
    """What this rank's windows see, with zeros beyond the ends; and the layout of the windows."""
    windows = _windows(x.sequence, kernel, stride, padding, dilation)
    if windows is None:
        return None
    layout, wanted, beyond = windows
    seen = fetch(x.local, x.split_dim, x.sequence, wanted, "halo", x.group)
    ends = beyond[x.group.rank]
    return (F.pad(seen, [0, 0] * (x.ndim - 1 - x.split_dim) + list(ends)) if any(ends) else seen), layout


def _tuple(value: Any, n: int) -> list[int]:
    return [value] * n if isinstance(value, int) else list(value) * (n if len(value) == 1 else 1)


@rule("conv1d", "conv2d", "conv3d")
def convolution(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A convolution along the positions, perhaps with strides and dilation."""
    call, n = _CONVOLUTION.bind(args, kwargs), int(name_of(func)[-2])
    if call is None or not isinstance(call["input"], SequenceTensor):
        return NotImplemented
    x, weight = call["input"], call["weight"]
    if x.ndim != n + 2 or x.split_dim == 1 or isinstance(weight, SequenceTensor):
        return NotImplemented
    if x.split_dim == 0:
        return x.like(func(x.local, **{key: value for key, value in call.items() if key != "input"}))
    at, kernel = x.split_dim - 2, list(weight.shape[2:])
    stride, dilation = _tuple(call["stride"], n), _tuple(call["dilation"], n)
    if isinstance(call["padding"], str):
        if call["padding"] == "same" and any(d * (k - 1) % 2 for d, k in zip(dilation, kernel, strict=True)):
            return NotImplemented
        is_same = call["padding"] == "same"
        padding = [d * (k - 1) // 2 * is_same for d, k in zip(dilation, kernel, strict=True)]
    else:
        padding = _tuple(call["padding"], n)
    with_halo = _with_halo(x, kernel[at], stride[at], padding[at], dilation[at])
    if with_halo is None:
        return NotImplemented
    padding[at] = 0
    out = func(with_halo[0], weight, call["bias"], stride, padding, dilation, call["groups"])
    return SequenceTensor(out, x.split_dim, with_halo[1], x.group)


@rule("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d")
def pool(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A pool without padding."""
    plain = {
        "ceil_mode": False,
        "dilation": 1,
        "return_indices": False,
        "count_include_pad": True,
        "divisor_override": None,
    }
    rest = {key: value for key, value in kwargs.items() if key not in plain or value != plain[key]}
    call, n = _POOL.bind(args, rest), int(name_of(func)[-2])
    if call is None or not isinstance(call["input"], SequenceTensor):
        return NotImplemented
    x = call["input"]
    if x.ndim != n + 2 or any(_tuple(call["padding"], n)):
        return NotImplemented
    kernel = _tuple(call["kernel_size"], n)
    stride = _tuple(call["stride"] or kernel, n)
    if x.split_dim < 2:
        return x.like(func(x.local, kernel, stride))
    with_halo = _with_halo(x, kernel[x.split_dim - 2], stride[x.split_dim - 2], 0, 1)
    return (
        NotImplemented
        if with_halo is None
        else SequenceTensor(func(with_halo[0], kernel, stride), x.split_dim, with_halo[1], x.group)
    )


@rule("unfold")
def unfold(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.unfold(dim, size, step)``: windows in a dimension of their own. (``F.unfold`` is another operation.)"""
    if kwargs or len(args) != 4 or not isinstance(args[0], SequenceTensor) or not isinstance(args[1], int):
        return NotImplemented
    x, dim, size, step = args
    if dim % x.ndim != x.split_dim:
        return x.like(x.local.unfold(dim, size, step))
    with_halo = _with_halo(x, size, step, 0, 1)
    if with_halo is None:
        return NotImplemented
    return note_copy(x, SequenceTensor(with_halo[0].unfold(dim, size, step), x.split_dim, with_halo[1], x.group))


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``input, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first``."""
    if kwargs or len(args) != 9 or not isinstance(args[0], SequenceTensor) or args[0].ndim != 3:
        return NotImplemented
    x, state, rest = args[0], args[1], list(args[2:])
    dropout, is_training, is_bidirectional, batch_first = rest[3:]
    given = list(state) if isinstance(state, tuple | list) else [state]
    if x.split_dim != (1 if batch_first else 0) or any(isinstance(each, SequenceTensor) for each in given):
        return NotImplemented
    if dropout and is_training:
        return NotImplemented
    if not is_bidirectional and x.sequence.is_ordered and x.sequence.is_full_everywhere:
        return _in_stages(func, x, given, isinstance(state, tuple | list), rest)
    return _over_batch(func, x, given, isinstance(state, tuple | list), rest)


def _in_stages(
    func: Callable[..., Any], x: SequenceTensor, states: list[torch.Tensor], is_many: bool, rest: list[Any]
) -> Any:
    """Each rank gets the state of the one before it."""
    group, passed, out = x.group, list[torch.Tensor](), None
    weights = [weight for weight in tree_tensors(rest) if weight.requires_grad]
    for rank in range(group.size):
        if rank == group.rank:
            out, *new = func(x.local, tuple(states) if is_many else states[0], *rest)
        else:  # the same graph on every rank, so that backward makes the same exchanges
            new = [tie(torch.zeros_like(state), x.local, state, *weights) for state in states]
        states = [stack_ranks(state, "recurrent state", group)[rank] for state in new]
        passed += states
    assert out is not None
    return (x.like(tie(out, *passed)), *states)


def _over_batch(
    func: Callable[..., Any], x: SequenceTensor, states: list[torch.Tensor], is_many: bool, rest: list[Any]
) -> Any:
    """Each rank has all positions of some sequences of the batch."""
    group, dim = x.group, 1 - x.split_dim
    if x.shape[dim] < group.size:
        return NotImplemented
    layout = elsewhere(x.shape[dim], group.size)
    own = [take(state, 1, layout.index(group.rank)) for state in states]
    local = part_of(x, dim, layout, "recurrent", group)
    out, *new = func(local, tuple(own) if is_many else own[0], *rest)
    out = part_of(SequenceTensor(out, dim, layout, group), x.split_dim, x.sequence, "recurrent", group)
    return (x.like(out), *(SequenceTensor(state, 1, layout, group) for state in new))
