"""Operations along dimensions: local where the positions are not among these, else each rank's result is completed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import stack_ranks
from tensorshard.context_parallel.layout_changes import map_tensors, part_of, returned, sequence_tensors, turned
from tensorshard.context_parallel.rule_table import name_of, rule, writes
from tensorshard.context_parallel.rules.pointwise import pointwise
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_DIM_FIRST = (
    "glu", "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort", "argsort", "argmax", "argmin", "max",
    "min", "sum", "mean", "prod", "any", "all", "amax", "amin", "logsumexp", "var", "std", "gather", "cummax", "cummin",
    "logcumsumexp", "median", "scatter", "scatter_add", "var_mean", "std_mean", "count_nonzero", "nanmean", "nansum",
    "aminmax",
)  # fmt: skip
_DIM_SECOND = (
    "topk", "take_along_dim", "norm", "vector_norm", "normalize", "repeat_interleave", "cosine_similarity",
)  # fmt: skip
_DIM_AT = dict.fromkeys(_DIM_FIRST, 1) | dict.fromkeys(_DIM_SECOND, 2)
"""Where each operation has its dimension among the positional arguments."""

_DEFAULT_DIM = {"normalize": 1, "cosine_similarity": 1, "glu": -1, "sort": -1, "argsort": -1, "topk": -1}
_COMPLETED = {name: name for name in ["sum", "any", "all", "amax", "amin", "prod", "logsumexp"]} | {"mean": "sum"}
_INDEXED = ("gather", "scatter", "scatter_add", "take_along_dim")


@rule(*_DIM_AT)
def along(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation along some dimensions of its first argument."""
    name, x = name_of(func).rstrip("_"), args[0] if args else None
    if not isinstance(x, SequenceTensor) or kwargs.get("out") is not None or x.ndim == 0:
        return NotImplemented
    at = _DIM_AT[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else _DEFAULT_DIM.get(name)))
    if name in ("max", "min") and isinstance(dim, torch.Tensor):
        return pointwise(func, args, kwargs)
    if name in ("max", "min") and "other" in kwargs:
        return pointwise(func, args, kwargs)
    dims = _dims(dim, x.ndim, name)
    if dims is None:
        return NotImplemented
    if x.split_dim not in dims:
        return _beside(func, name, x, dims, args, kwargs)
    if writes(name_of(func)):
        return NotImplemented
    return _across(func, name, x, dims, at, args, kwargs)


def _dims(dim: Any, ndim: int, name: str) -> list[int] | None:
    """The dimensions that an operation works along; None where that is not known."""
    if name == "repeat_interleave" and dim is None:
        return None
    if dim is None or dim in ([], ()):
        return list(range(ndim))
    dims = [dim] if type(dim) is int else dim
    if not isinstance(dims, list | tuple) or not all(type(each) is int for each in dims):
        return None
    return [each % ndim for each in dims]


def _beside(
    func: Callable[..., Any], name: str, x: SequenceTensor, dims: list[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Along other dimensions than that of the positions: local."""
    removed = sum(dim < x.split_dim for dim in dims)

    def result(out: torch.Tensor) -> SequenceTensor:
        return SequenceTensor(out, x.split_dim - (0 if out.dim() == x.ndim else removed), x.sequence, x.group)

    others = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.Tensor)]
    if not others:
        out = func(x.local, *args[1:], **kwargs)
        return result(out) if type(out) is torch.Tensor else map_tensors(result, out)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is x:
            return x.local
        is_alike = tensor.ndim == x.ndim and tensor.shape[x.split_dim] == x.sequence.length
        return part_of(tensor, x.split_dim if is_alike else None, x.sequence, name, x.group)

    if name in _INDEXED and any(
        t.ndim != x.ndim or t.shape[x.split_dim] != x.sequence.length for t in others if t.ndim
    ):
        return NotImplemented
    if name == "cosine_similarity" and any(t.shape != x.shape for t in others):
        return NotImplemented
    out = func(*map_tensors(part, tuple(args)), **map_tensors(part, kwargs))
    return x if writes(name_of(func)) else map_tensors(result, out)


def _across(
    func: Callable[..., Any],
    name: str,
    x: SequenceTensor,
    dims: list[int],
    at: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Along the positions."""
    if name in ("softmax", "log_softmax") and len(dims) == 1:
        return _softmax(name, x.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else x, dims)
    whole_name = {"max": "amax", "min": "amin"}.get(name, name)
    if whole_name != name and (len(args) > 1 or kwargs):
        whole_name = name
    if name in ("var", "std") and _dims_given(args, kwargs):
        return _variance(name, x, dims, args, kwargs)
    if whole_name in _COMPLETED and (x.sequence.is_full_everywhere or name in ("sum", "mean")):
        return _completed(whole_name, x, dims, at, args, kwargs)
    if sequence_tensors((tuple(args[1:]), kwargs)) or name in _INDEXED:
        return NotImplemented
    y = turned(x, dims, name)
    if y is None:
        return NotImplemented
    out = along(func, (y, *args[1:]), kwargs)
    return out if out is NotImplemented else map_tensors(lambda each: returned(each, x, name), out)


def _dims_given(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dim") is not None or (len(args) > 1 and args[1] is not None and not isinstance(args[1], bool))


def _softmax(name: str, x: torch.Tensor, dims: list[int]) -> Any:
    y = x - x.detach().amax(dims, True)
    if name == "log_softmax":
        return y - y.exp().sum(dims, True).log()
    e = y.exp()
    return e / e.sum(dims, True)


def _variance(name: str, x: SequenceTensor, dims: list[int], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) > 2 or not set(kwargs) <= {"dim", "correction", "unbiased", "keepdim"}:
        return NotImplemented
    correction = kwargs.get("correction", int(kwargs.get("unbiased", True)))
    count = math.prod(x.shape[dim] for dim in dims) - (1 if correction is None else correction)
    out = ((x - x.mean(dims, True)) ** 2).sum(dims, kwargs.get("keepdim", False)) / max(count, 0)
    return out.sqrt() if name == "std" else out


def _completed(
    name: str, x: SequenceTensor, dims: list[int], at: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Reduces this rank's positions, then the ranks' results."""
    if not set(kwargs) <= {"dim", "axis", "keepdim", "keepdims", "dtype"} or len(args) > at + 2:
        return NotImplemented
    keep = kwargs.get("keepdim", kwargs.get("keepdims", args[at + 1] if len(args) > at + 1 else False))
    if not isinstance(keep, bool):
        return NotImplemented
    local = x.local if kwargs.get("dtype") is None else x.local.to(kwargs["dtype"])
    reduce = getattr(torch, _COMPLETED[name])
    given: Any = dims
    if name == "prod" or (name in ("any", "all") and len(dims) > 1):
        if len(dims) == x.ndim and not (len(dims) == 1 or keep):
            local, given = local.flatten(), 0
        elif name == "prod":
            if len(dims) > 1:
                return NotImplemented
            given = dims[0]
    out = reduce(stack_ranks(reduce(local, given, keepdim=keep), name, x.group), 0)
    if name == "mean":
        return out / math.prod(x.shape[dim] for dim in dims)
    return out
