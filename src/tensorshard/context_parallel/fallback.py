"""What no rule knows: gather, compute on whole tensors, cut again. It is exact for every function, and counted."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.layout_changes import cut_for, gathered, map_tensors, sequence_tensors
from tensorshard.context_parallel.rule_table import name_of, writes
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_SMALLEST = 64
"""Results of fewer elements stay whole."""

_VALUES = frozenset((
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__contains__", "is_nonzero", "equal", "allclose", "__format__",
))  # fmt: skip
"""Questions for values, which need a whole tensor by their nature."""


def compute_whole(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str | None = None
) -> Any:
    """``func(*args, **kwargs)`` on whole tensors, on every rank.

    Returns:
        What `func` returns; large tensors that have a dimension of the sequence's length are cut along it.
    """
    name = name or name_of(func)
    given = sequence_tensors((tuple(args), kwargs))
    if name not in _VALUES:
        given[0].group.note_fallback(name)
    out = kwargs.get("out")
    if isinstance(out, SequenceTensor):
        result = func(*_whole(tuple(args), name), **_whole({**kwargs, "out": None}, name))
        return out.copy_(result)
    if writes(name_of(func)) and isinstance(args[0], SequenceTensor):
        return _written(func, args, kwargs, name)
    result = func(*_whole(tuple(args), name), **_whole(kwargs, name))
    return result if writes(name) else cut_again(result, given)


def _whole(tree: Any, name: str) -> Any:
    return map_tensors(lambda tensor: gathered(tensor, name), tree)


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    target: SequenceTensor = args[0]
    copy = gathered(target, name).clone()
    func(copy, *_whole(tuple(args[1:]), name), **_whole(kwargs, name))
    if copy.shape != target.shape:
        raise NotImplementedError(
            f"{name} would change the shape of a tensor that is cut along its sequence in place; use the function that "
            "returns a new tensor"
        )
    target.local.copy_(cut_for(copy, target.split_dim, target.sequence, target.group).local)
    return target


def cut_again(tree: Any, given: Sequence[SequenceTensor]) -> Any:
    """`tree` with those whole tensors cut that have a dimension of one of the given sequences' lengths."""
    largest = max(tensor.numel() for tensor in given)
    of_share = any(tensor.sequence.origin for tensor in given)  # which no rank may hold whole

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, SequenceTensor):
            return tensor
        is_plain = not tensor.is_floating_point() and tensor.numel() <= largest
        if (is_plain or tensor.numel() < _SMALLEST) and not of_share:
            return tensor
        for like in given:
            for dim in (like.split_dim, like.split_dim - like.ndim + tensor.ndim, *range(tensor.ndim)):
                if 0 <= dim < tensor.ndim and tensor.shape[dim] == like.sequence.length:
                    return cut_for(tensor, dim, like.sequence, like.group)
        return tensor

    return map_tensors(one, tree)
