"""Finds the shapes that a unit returns by running it, if they depend on values, as in a mixture of experts."""

from typing import Any

import torch
from torch import nn

from tensorshard.model.fake_copies import copy_with
from tensorshard.model.forwards import Role, forward_within
from tensorshard.model.tensors import map_tensors


def run_for_real(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a copy of `unit` with arbitrary weights returns for arbitrary values, on the CPU.

    It takes the memory of that one unit until it returns.

    Args:
        unit: on fake tensors; it is not changed.
        args, kwargs: only the tensors' shapes, types and ``requires_grad`` count.
    """
    generator = torch.Generator().manual_seed(0)

    def values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).mul_(0.02).to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    copied = copy_with(unit, values)
    forward = forward_within(copied, Role.TRACE)  # the tracer's notes calls on fake tensors; hooks are around it
    given = map_tensors(
        lambda tensor: values("", tensor).requires_grad_(tensor.requires_grad and tensor.is_floating_point()),
        (args, kwargs),
    )
    return forward(*given[0], **given[1])
