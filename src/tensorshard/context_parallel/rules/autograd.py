"""Hooks and backwards of sequence tensors: what autograd knows is this rank's part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.layout_changes import part_of
from tensorshard.context_parallel.rule_table import rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor


@rule("register_hook")
def register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The hook sees the gradient as a sequence tensor, if it looks at it."""
    x, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    dim, layout, group = x.split_dim, x.sequence, x.group
    if not getattr(hook, "takes_gradient", True):
        return x.local.register_hook(hook)

    def with_local(grad: torch.Tensor) -> torch.Tensor | None:
        out = hook(SequenceTensor(grad, dim, layout, group))
        return None if out is None else part_of(out, dim, layout, "hook", group)

    return x.local.register_hook(with_local)


@rule("backward")
def backward(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.backward(gradient)``: each position's gradient is complete."""
    x, *rest = args
    if not isinstance(x, SequenceTensor):
        gradient = [part.local if isinstance(part, SequenceTensor) else part for part in rest]
        return func(x, *gradient, **kwargs)
    gradient = rest[0] if rest else kwargs.pop("gradient", None)
    if gradient is None:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    x.local.backward(part_of(gradient, x.split_dim, x.sequence, "gradient", x.group), *rest[1:], **kwargs)
    return None


@rule("grad")
def grad(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``."""
    raise NotImplementedError(
        "torch.autograd.grad of a tensor that is cut along its sequence: each rank has a part of the gradient only. "
        "Call backward() and read x.grad, or compute this without context parallelism"
    )


@rule("grad=")
def set_gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A gradient that is a sequence tensor, given to a plain tensor."""
    raise TypeError("a plain tensor was given a gradient that is cut along a sequence; give it whole(gradient)")
