"""A tensor that shares another's memory and is its own to autograd."""

from typing import Any

import torch


class DetachedAlias(torch.autograd.Function):
    """The identity. Unlike a view, its result may be detached and be changed in place whatever it came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient
