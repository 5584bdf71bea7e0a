"""What a call computes, forward and backward, and how long it takes."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tensorshard.model.tensors import map_tensors_once, tensor_leaves

_SEED = 1
_CALLS = 7  # at least; and as many as take this long, up to a limit
_SECONDS = 0.1
_MOST_CALLS = 100
_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LEAST_SCALE = 1e-3  # of the largest tensor beside it: a gradient that is zero but for rounding is not compared with 0


def fresh(values: Any) -> Any:
    """Copies of all tensors in `values`; those of floating point require gradients."""
    return map_tensors_once(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), values)


def results(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The floating-point tensors that a call returns, and gradients of its inputs and of `parameters`.

    Torch's random state begins at the same place in each call, and is put back.
    """
    leaves = fresh((args, kwargs))
    args, kwargs = map_tensors_once(lambda t: t.clone(), leaves)  # which the call may write to
    wanted = _differentiable([*tensor_leaves(leaves), *parameters])
    with torch.random.fork_rng(list({t.device for t in wanted if t.device.type == "cuda"})), torch.enable_grad():
        torch.manual_seed(_SEED)
        outputs = [t for t in tensor_leaves(call(*args, **kwargs)) if t.is_floating_point()]
        grads = _gradients(outputs, wanted)
    return [t.detach() for t in outputs], grads


def timed(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[torch.Tensor] = ()
) -> Callable[[], None]:
    """What computes the same as :func:`results`, and nothing beside it, for :func:`seconds`."""
    args, kwargs = fresh((args, kwargs))
    wanted = _differentiable([*tensor_leaves((args, kwargs)), *parameters])
    weights: list[torch.Tensor] = []

    def run() -> None:
        with torch.enable_grad():
            outputs = [t for t in tensor_leaves(call(*args, **kwargs)) if t.is_floating_point()]
            _gradients(outputs, wanted, weights)

    return run


def _differentiable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if t.requires_grad]


def _gradients(
    outputs: list[torch.Tensor], wanted: list[torch.Tensor], weights: list[torch.Tensor] | None = None
) -> list[torch.Tensor | None]:
    """Gradients of a sum of all `outputs` by random `weights`, which are made if they are not there."""
    outputs, weights = _differentiable(outputs), [] if weights is None else weights
    if not outputs or not wanted:
        return []
    if not weights:
        weights += [torch.randn(t.shape, dtype=torch.float32).to(t) for t in outputs]
    return list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))


def difference(actual: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest difference of two lists of tensors, in parts of the largest value; infinite for other shapes."""
    actual, expected = list(actual), list(expected)
    if len(actual) != len(expected):
        return float("inf")
    sizes = [0.0 if t is None or not t.numel() else t.abs().max().item() for t in expected]
    floor = _LEAST_SCALE * max(sizes, default=0.0)
    worst = 0.0
    for one, other, size in zip(actual, expected, sizes, strict=True):
        if one is None or other is None:
            if (one is None) != (other is None) and (one if other is None else other).abs().max() > floor:
                return float("inf")
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if one.numel():
            apart = (one.double() - other.double()).abs().max().item()
            worst = max(worst, float("inf") if math.isnan(apart) else apart / max(size, floor, 1e-30))
    return worst


def rounding(dtype: torch.dtype) -> float:
    """The difference that rounding in `dtype` makes."""
    return _BOUNDS.get(dtype, 0.0)


def bound(tensors: Iterable[torch.Tensor]) -> float:
    """The difference that rounding makes, of the narrowest type among `tensors`."""
    return max((rounding(t.dtype) for t in tensors), default=0.0)


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """How long each of `calls` takes: the least of several, in turn, so that all meet the same load."""
    best = [float("inf")] * len(calls)
    begin = time.perf_counter()
    for turn in range(_MOST_CALLS):
        if turn >= _CALLS and time.perf_counter() - begin > _SECONDS * len(calls):
            break
        for index, call in enumerate(calls):
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
