"""Initial values of split parameters, like ``torch.nn.init``."""

from collections.abc import Callable
from typing import Any

import torch

from tensorshard.comm import groups, primitives
from tensorshard.comm.collectives import broadcast_
from tensorshard.comm.marks import _PARALLEL_DIM, get_layout, split_parameter_of
from tensorshard.comm.sharded_tensors import own_group, own_shard

__all__ = ["shard_init_helper_"]


@torch.no_grad()
def shard_init_helper_(
    init_method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Initialises a tensor in place as `init_method` would initialise the full one.

    The values are those that the first rank of the group draws for the full tensor; the random seeds of the other ranks
    do not matter. A split parameter gets its shard of them, and a parameter that every rank holds in full gets all of
    them. Every rank of the group calls this, and holds the full tensor until it returns.

    Args:
        init_method: a function of ``torch.nn.init``.
        tensor: a parameter of a parallel layer, or its ``.data``. For any other tensor, this only calls `init_method`.
        args, kwargs: further arguments of `init_method`.

    Returns:
        `tensor`.

    Raises:
        RuntimeError: the parameter's mark names no group, and there is no model-parallel group.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> layer = ts.nn.ParallelLinear(16, 64, dim=1)
        >>> ts.nn.init.shard_init_helper_(torch.nn.init.normal_, layer.weight, std=0.02).shape
        torch.Size([32, 16])
    """
    parameter = split_parameter_of(tensor)
    layout = get_layout(parameter)
    if layout is None:
        init_method(tensor, *args, **kwargs)
        if hasattr(tensor, _PARALLEL_DIM) and groups.is_initialized() and _has_values(tensor):
            broadcast_(tensor, groups.get_group())  # the layer has dim=None
        return tensor
    group, shape = own_group(parameter), list(tensor.shape)
    if layout.dim is not None:
        size = layout.size
        if size is None:
            size = sum(primitives.exchange_sizes(shape[layout.dim], group, tensor.device))
        shape[layout.dim] = size
    full = tensor.new_empty(shape)
    init_method(full, *args, **kwargs)
    if _has_values(full):
        broadcast_(full, group)
    tensor.copy_(own_shard(full, layout))
    return tensor


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether it is neither fake nor on the meta device."""
    return type(tensor.detach()) is torch.Tensor and not tensor.is_meta
