"""Sizes that a forward reshapes to, made to fit the features or the positions that a rank's tensors have.

Much attention code takes sizes from its input: ``B, T, C = x.size()`` and later ``y.view(B, T, C)``. No attribute can
be divided to make that fit.

- ``divide(reshape.sizes)``: the input has all features, and later tensors have a rank's. If a reshape or a split asks
  for the elements of all ranks together, the size that the split features belong to is divided.
- Sequence parallelism: the input is a rank's part of the sequence, and the outputs of column layers have all positions.
  Reshapes to the part's length get the full one.
"""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensorshard.model.forwards import Forward


def forward_with_local_shapes(size: int, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward`, whose reshapes and splits ask for `size` times the features that the tensors have."""
    with _LocalShapes(size):
        return forward(*args, **kwargs)


class _LocalShapes(TorchFunctionMode):
    """Changes the arguments of reshapes and splits that do not fit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        change = _CHANGES.get(func)
        if change is not None:
            args, kwargs = change(self._size, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def local_sizes(shape: Sequence[int], wanted: Sequence[int], ranks: int) -> list[int]:
    """The sizes to reshape a tensor of `shape` to. `wanted` may be the sizes for all ranks' tensors together.

    The split dimension of the tensor is not known. It is taken to be the one that, made whole, has most boundaries
    between dimensions in common with `wanted`; the last of several. The first of its new sizes that can be divided is
    divided: a rank has consecutive features, which belong to some complete heads.

    Returns:
        `wanted` itself if it fits, or if no division would help.
    """
    elements, asked = math.prod(shape), math.prod(wanted)
    if -1 in wanted or asked != elements * ranks or not elements:
        return list(wanted)
    ends = _ends(wanted)
    common = [
        set(ends) & set(_ends([*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]])) for dim in range(len(shape))
    ]
    dim = max(range(len(shape)), key=lambda dim: (len(common[dim]), dim))
    before = math.prod(shape[:dim])  # elements before the split dimension; sizes up to there are not divided
    start = max((end for end in common[dim] if end <= before), default=0)
    for place, count in enumerate(wanted):
        if ends[place] > start and count % ranks == 0:
            return [*wanted[:place], count // ranks, *wanted[place + 1 :]]
    return list(wanted)


def local_parts(extent: int, parts: int | Sequence[int], ranks: int) -> int | list[int]:
    """The parts to split a dimension of `extent` into. `parts` may be meant for all ranks' dimensions together."""
    if isinstance(parts, int):
        fits = extent % parts == 0 or (extent * ranks) % parts or parts % ranks
        return parts if fits else parts // ranks
    if sum(parts) != extent * ranks or any(part % ranks for part in parts):
        return list(parts)
    return [part // ranks for part in parts]


def _ends(sizes: Sequence[int]) -> list[int]:
    """The product of the sizes up to each of them."""
    return list(accumulate(sizes, operator.mul))


def _reshaped(ranks: int, tensor: torch.Tensor, *shape: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sizes = kwargs.get("shape", kwargs.get("size", shape))
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = sizes[0]
    if not all(isinstance(count, int) for count in sizes):  # Tensor.view(dtype)
        return (tensor, *shape), kwargs
    return (tensor, local_sizes(tensor.shape, sizes, ranks)), {}


def _unflattened(ranks: int, tensor: torch.Tensor, dim: int, sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor, dim, local_sizes((tensor.size(dim),), sizes, ranks)), {}


def _split(ranks: int, tensor: torch.Tensor, *given: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (key, parts), *others = [*zip(_SPLIT_ARGUMENTS, given, strict=False), *kwargs.items()]
    if key == "dim":
        others, (key, parts) = [(key, parts)], others[0]
    options = dict(others)
    return (tensor, local_parts(tensor.size(options.get("dim", 0)), parts, ranks)), options


_SPLIT_ARGUMENTS = ("split_size", "dim")
_CHANGES: dict[Any, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    torch.Tensor.view: _reshaped,
    torch.Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    torch.Tensor.unflatten: _unflattened,
    torch.unflatten: _unflattened,
    torch.Tensor.split: _split,
    torch.split: _split,
}


# -- lengths of sequences --


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
