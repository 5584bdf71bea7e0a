"""Initial values of split parameters, like ``torch.nn.init``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import local_shard


@torch.no_grad()
def shard_init_helper_(
    init_method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Initialises a tensor in place as `init_method` would initialise the whole of it.

    A split parameter gets its part of what an unsplit one would get on the first rank of the group, whatever the random
    seeds of the others. The whole tensor exists for that long on every rank, and all of them call this.

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
    if type(local) is torch.Tensor and not local.is_meta:
        for axis in range(tensor.device_mesh.ndim):
            dist.broadcast(whole, group_src=0, group=tensor.device_mesh.get_group(axis))
    local.copy_(local_shard(whole, tensor.device_mesh, tensor.placements))
    return tensor
