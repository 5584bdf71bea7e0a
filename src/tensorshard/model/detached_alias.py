"""A tensor that shares another's memory, and that autograd treats as a tensor of its own."""

from typing import Any

import torch


class DetachedAlias(torch.autograd.Function):
    """The identity. Its result, unlike a view, may be detached and be changed in place, whatever it was made from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient
