"""Over positions: reductions, running sums, normalizations and losses. Each rank has its own part, and ranks add up."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tensorshard.context_parallel.exchanges import stack_ranks, sum_ranks, take
from tensorshard.context_parallel.layout_changes import map_tensors, part_of, returned, sequence_tensors, turned
from tensorshard.context_parallel.layouts import Places, SequenceLayout
from tensorshard.context_parallel.rule_table import Signature, name_of, rule, writes
from tensorshard.context_parallel.rules.pointwise import pointwise, without_reduction
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
_CALL = Signature(lambda input, dim, dtype=None: 0)


_MOST_RUNS = 64
_DIFF = Signature(lambda input, n=1, dim=-1, prepend=None, append=None: 0)
_GROUP_NORM = Signature(lambda input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: 0)
_BATCH_NORM = Signature(
    lambda input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5: 0
)
_CROSS_ENTROPY = Signature(
    lambda input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0: 0
)  # fmt: skip


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


@rule("diff")
def diff(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Differences of neighbours: two slices."""
    call = _DIFF.bind(args, kwargs)
    if call is None or call["n"] != 1 or call["input"].dtype == torch.bool:
        return NotImplemented
    dim = call["dim"] % call["input"].ndim
    pieces = [piece for piece in (call["prepend"], call["input"], call["append"]) if piece is not None]
    x = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
    return x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1)


@rule("cumsum")
def cumsum(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A running sum. The order within a rank may be any, as long as the ranks' runs are known."""
    call = _CALL.bind(args, kwargs)
    if call is None:
        return along(func, args, kwargs)
    x, dim, dtype = call["input"], call["dim"], call["dtype"]
    if (
        not isinstance(x, SequenceTensor)
        or not isinstance(dim, int)
        or dim % x.ndim != x.split_dim
        or dtype is not None
    ):
        return along(func, args, kwargs)
    most = max(len(runs) for runs in x.sequence.runs)
    return along(func, args, kwargs) if most > _MOST_RUNS else x.like(_by_runs(x, most))


def _by_runs(x: SequenceTensor, most: int) -> torch.Tensor:
    """The sums of all runs are exchanged, and each run begins with those before it."""
    dim, rank = x.split_dim, x.group.rank
    lengths = [int(stop - start) for start, stop in x.sequence.runs[rank]]
    parts = x.local.split([*lengths, *[0] * (most - len(lengths))], dim)
    sums = torch.stack([part.sum(dim, keepdim=True) for part in parts])
    everyone = stack_ranks(sums, "cumsum", x.group).flatten(0, 1)  # [ranks * most, ...]
    out = []
    for part, earlier in zip(parts, _runs_before(x.sequence, rank, most), strict=True):
        total = part.cumsum(dim)
        out.append(total + take(everyone, 0, earlier).sum(0).to(total.dtype))
    return torch.cat(out, dim)


@lru_cache(64)
def _runs_before(layout: SequenceLayout, rank: int, most: int) -> list[Places]:
    """For each run of a rank, which of the [ranks * most] ones begin before it. Those that are not there begin last."""
    starts = np.full((layout.ranks, most), layout.length)
    for each, runs in zip(starts, layout.runs, strict=True):
        each[: len(runs)] = runs[:, 0]
    return [Places(np.flatnonzero(starts.reshape(-1) < start)) for start in starts[rank]]


@rule("layer_norm", "rms_norm")
def layer_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Over the last dimensions."""
    x = args[0]
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape")
    if not isinstance(x, SequenceTensor) or shape is None or x.split_dim >= x.ndim - len(shape):
        return NotImplemented
    if any(isinstance(arg, SequenceTensor) for arg in (*args[1:], *kwargs.values())):
        return NotImplemented
    return x.like(func(x.local, *args[1:], **kwargs))


@rule("group_norm")
def group_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Over groups of channels and all positions."""
    call = _GROUP_NORM.bind(args, kwargs)
    if call is None or not isinstance(call["input"], SequenceTensor) or call["input"].split_dim < 2:
        return NotImplemented
    x, weight, bias = call["input"], call["weight"], call["bias"]
    shape = [1, -1] + [1] * (x.ndim - 2)
    y: Any = x.unflatten(1, (call["num_groups"], -1))
    dims = list(range(2, y.ndim))
    y = y - y.mean(dims, True)
    y = (y * ((y * y).mean(dims, True) + call["eps"]).rsqrt()).flatten(1, 2)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


@rule("batch_norm")
def batch_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Over the batch and all positions. Running statistics are updated equally on all ranks."""
    call = _BATCH_NORM.bind(args, kwargs)
    if call is None or not isinstance(call["input"], SequenceTensor) or call["input"].split_dim == 1:
        return NotImplemented
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if not call["training"]:
        return x.like(func(x.local, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"}))
    shape, dims = [1, -1] + [1] * (x.ndim - 2), [dim for dim in range(x.ndim) if dim != 1]
    count = x.numel() // x.shape[1]
    if count < 2:
        return NotImplemented  # torch's own error
    y: Any = x if x.dtype not in (torch.bfloat16, torch.float16) else x.float()
    mean = y.mean(dims)
    var = ((y - mean.view(shape)) ** 2).mean(dims)
    if call["running_mean"] is not None:
        with torch.no_grad():
            momentum = call["momentum"]
            call["running_mean"].lerp_(mean.detach().to(call["running_mean"].dtype), momentum)
            unbiased = var.detach() * count / (count - 1)
            call["running_var"].lerp_(unbiased.to(call["running_var"].dtype), momentum)
    y = (y - mean.view(shape)) * (var + call["eps"]).rsqrt().view(shape)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return y.to(x.dtype)


@rule("cross_entropy", "nll_loss")
def cross_entropy(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The loss of classes. The positions may be any dimension but the classes."""
    call = _CROSS_ENTROPY.bind(args, kwargs)
    if call is None or call["size_average"] is not None or call["reduce"] is not None:
        return NotImplemented
    x, target, weight, ignored = call["input"], call["target"], call["weight"], call["ignore_index"]
    if not isinstance(x, SequenceTensor) or x.ndim < 2 or x.split_dim == 1 or isinstance(weight, SequenceTensor):
        return NotImplemented
    has_probabilities = target.is_floating_point()
    dim = x.split_dim - (x.split_dim > 0)
    target = part_of(target, x.split_dim if has_probabilities else dim, x.sequence, name_of(func), x.group)
    options = {"label_smoothing": call["label_smoothing"]} if name_of(func) == "cross_entropy" else {}
    local = func(x.local, target, weight=weight, ignore_index=ignored, reduction="none", **options)
    if call["reduction"] == "none":
        return SequenceTensor(local, dim, x.sequence, x.group)
    if call["reduction"] == "sum":
        return sum_ranks(local.sum(), "loss", x.group)
    if has_probabilities:
        return sum_ranks(local.sum(), "loss", x.group) / (x.numel() // x.shape[1])
    valid = (target != ignored).to(local.dtype)
    if weight is not None:
        valid = valid * weight[target.clamp(min=0)]
    both = sum_ranks(torch.stack([local.sum(), valid.sum().to(local.dtype)]), "loss", x.group)
    return both[0] / both[1]


_BY_ELEMENT = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "poisson_nll_loss",
)  # fmt: skip
_TWO = Signature(lambda input, target, reduction="mean", **options: 0)


@rule(*_BY_ELEMENT, "binary_cross_entropy_with_logits", "soft_margin_loss")
def by_element(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A loss that is computed element by element."""
    if len(args) == 3 and args[2] is None:
        args = args[:2]
    call = None if len(args) > 2 else _TWO.bind(args, kwargs)
    if call is None or call["reduction"] not in ("mean", "sum", "none"):
        return NotImplemented
    options = call.get("options", {})
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        return NotImplemented
    losses = pointwise(without_reduction(func), (call["input"], call["target"]), options)
    if losses is NotImplemented or call["reduction"] == "none":
        return losses
    return losses.mean() if call["reduction"] == "mean" else losses.sum()
