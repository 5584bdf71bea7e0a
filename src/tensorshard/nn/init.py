"""Initial values of split parameters, like ``torch.nn.init``."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorshard.distributed.sharding import local_part


@torch.no_grad()
def shard_init_helper_(
    init_method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Initialises a tensor in place as `init_method` would initialise the whole of it.

    With the same random seed on every rank, a split parameter thus gets its part of what an unsplit one would
    get. The whole tensor exists for that long on every rank.

    Args:
        init_method: a function of ``torch.nn.init``.
        tensor: a parameter of a parallel layer, or its ``.data``; any other tensor is initialised as it is.
        args, kwargs: of `init_method`, after its tensor.

    Returns:
        `tensor`.
    """
    if not isinstance(tensor, DTensor):
        init_method(tensor, *args, **kwargs)
        return tensor
    local = tensor.to_local()
    whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    init_method(whole, *args, **kwargs)
    local.copy_(local_part(whole, tensor.device_mesh, tensor.placements))
    return tensor
