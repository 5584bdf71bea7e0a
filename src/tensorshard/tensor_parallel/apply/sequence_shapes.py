"""Reshapes to a sequence length that code read from a block's input: they get the length that the tensor has.

A block that holds its layers itself often begins with ``b, t, c = x.shape``, and later has ``q.view(b, t, heads, -1)``.
If the input is this rank's part of the sequence, `t` is the part's length. But the output of a column layer has all
positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensorshard.model.forwards import Forward


def forward_with_full_lengths(
    lengths: Callable[[], tuple[int, int]], dim: int, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls `forward`, whose reshapes ask for a part's length although the tensors have all positions.

    Args:
        lengths: returns the number of positions on this rank, and on all ranks.
        dim: the dimension of the positions.
    """
    with _FullLengths(*lengths(), dim):
        return forward(*args, **kwargs)


class _FullLengths(TorchFunctionMode):
    """Changes the sizes of reshapes that ask for a part's length."""

    def __init__(self, part: int, length: int, dim: int) -> None:
        super().__init__()
        self._part, self._length, self._dim = part, length, dim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RESHAPES and self._part != self._length:
            tensor, *shape = args
            sizes = kwargs.get("shape", kwargs.get("size", shape))
            if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
                sizes = sizes[0]
            if all(isinstance(count, int) for count in sizes):  # else Tensor.view(dtype)
                return func(tensor, full_sizes(tensor.shape, sizes, self._part, self._length, self._dim))
        return func(*args, **kwargs)


def full_sizes(shape: Sequence[int], wanted: Sequence[int], part: int, length: int, dim: int) -> list[int]:
    """The sizes to reshape a tensor of `shape` to. `wanted` may have `part` where the tensor has `length` positions.

    Only the features, which follow the positions, may be reshaped: split into heads, or joined. Whether the sizes fit
    decides nothing, since code may ask for all ranks' features as well.

    Returns:
        `wanted` itself if it is no such reshape.
    """
    features = len(shape) == dim + 2 or len(wanted) == dim + 2
    if not features or min(len(shape), len(wanted)) <= dim or list(shape[:dim]) != list(wanted[:dim]):
        return list(wanted)
    return [*wanted[:dim], length, *wanted[dim + 1 :]] if (shape[dim], wanted[dim]) == (length, part) else list(wanted)


_RESHAPES = frozenset([torch.Tensor.view, torch.Tensor.reshape, torch.reshape])
