"""Replaces the calls of torch's function ``batch_norm`` inside a module's forward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class BatchNormCalls(TorchFunctionMode):
    """A context in which `batch_norm` takes the place of torch's function in each call that uses batch statistics.

    Args:
        batch_norm: takes ``(input, running_mean, running_var, weight, bias, momentum, eps)``.

    Attributes:
        count: calls of torch's function so far, of either kind.
    """

    def __init__(self, batch_norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._batch_norm = batch_norm
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._functional(*args, **kwargs)
        if func is torch.batch_norm:
            return self._native(*args, **kwargs)
        return func(*args, **kwargs)

    # The arguments of torch's two functions, by their names.

    def _functional(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        self.count += 1
        if training:
            return self._batch_norm(input, running_mean, running_var, weight, bias, momentum, eps)
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)

    def _native(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        return self._functional(input, running_mean, running_var, weight, bias, training, momentum, eps)
