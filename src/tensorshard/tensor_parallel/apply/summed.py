"""Forwards whose outputs, or whose gradients, are summed over the ranks."""

from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.sharding import to_local
from tensorshard.model.forwards import Forward
from tensorshard.torch_private.modules import own_parameters, set_parameter
from tensorshard.torch_private.pytree import tree_map_only


def gather_into(size: int, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The gathered output of `forward`. Each rank goes on to compute something else with it."""
    return collectives.gather_for_sum(forward(*args, **kwargs), -1, group, size=size)


def copy_into(group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The full output of `forward`. Each rank goes on to compute something else with it."""
    return collectives.copy(forward(*args, **kwargs), group)


def sum_parts(group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """The sum over the ranks of what `forward` returns."""

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return collectives.copy(tensor, group) if tensor.requires_grad else tensor

    args, kwargs = tree_map_only(torch.Tensor, given, (args, kwargs))
    return tree_map_only(torch.Tensor, lambda part: collectives.reduce(part, group), forward(*args, **kwargs))


def forward_summing(
    module: nn.Module,
    names: list[str],
    divided: Container[str],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `forward` on parameters whose gradients are summed over the ranks, which have different activations.

    Args:
        divided: names of the parameters to divide by the number of ranks: each rank adds these to its part of a sum.
    """
    own = own_parameters(module)
    held = {name: own[name] for name in names}
    try:
        for name, parameter in held.items():
            copied = collectives.copy(to_local(parameter), group)
            set_parameter(module, name, copied / group.size() if name in divided else copied)
        return forward(*args, **kwargs)
    finally:
        for name, parameter in held.items():
            set_parameter(module, name, parameter)
