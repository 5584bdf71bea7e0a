"""Backwards that cannot be differentiated again say so when that is asked for."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function


def once_differentiable(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As ``torch.autograd.function.once_differentiable``, with a sentence that names `what`, and what to use instead.

    torch's own takes the gradient for a constant if the gradient that arrives is one, as that of a loss is. A second
    backward would then miss terms.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            asked = torch.is_grad_enabled()
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not asked:
                return found
            given = [value for value in found if isinstance(value, torch.Tensor)]
            refusing = iter(_Refusing.apply(what, torch.zeros((), requires_grad=True), *given) if given else ())
            return tuple(next(refusing) if isinstance(value, torch.Tensor) else value for value in found)

        return run

    return decorate


class _Refusing(Function):
    @staticmethod
    def forward(ctx: Any, what: str, _: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.what = what
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"a gradient of {ctx.what} was differentiated again, and that has no second derivative")
