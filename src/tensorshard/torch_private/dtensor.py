"""Where a DTensor's shard lies.

`compute_local_shape_and_global_offset`: the shape and the place in the full tensor of this rank's shard.

Why: checkpoints write shards with their places, those of strided placements included.

Checked: torch 2.11 and 2.13.

Public way: none for strided placements; arithmetic as in ``tensorshard.comm.sharding`` for others.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset", "local_tensor"]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's shard, the object itself, which autograd does not follow.

    Why: a ledger looks at storages while an operation on DTensors ends.

    Checked: torch 2.11 and 2.13.

    Public way: ``to_local()`` under ``torch.no_grad()``, which makes another tensor of a parameter's at each call.
    """
    return tensor._local_tensor
