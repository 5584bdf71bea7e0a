"""States with a row for each row of a parameter, split as it is."""

import torch
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import local_shard
from tensorshard.torch_private.dtensor import local_tensor

MOMENTUM_SCALES = "momentum_scales"
"""Scales of 8-bit momenta: a row of them for each row of a parameter, so that they are not of its shape."""


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with the whole."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def split_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a tensor split as `parameter` is, whose rows are its rows."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size([parameter.size(0), *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def rows_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a state, whole or not, of a parameter.

    Raises:
        ValueError: it has other rows.
    """
    local = local_rows(parameter)
    if isinstance(value, DTensor):
        same = isinstance(parameter, DTensor) and value.device_mesh == parameter.device_mesh
        value = local_tensor(value) if same else value.full_tensor()
    if len(value) != len(local) and isinstance(parameter, DTensor) and len(value) == parameter.size(0):
        value = local_shard(value, parameter.device_mesh, parameter.placements)
    if len(value) != len(local):
        raise ValueError(
            f"a momentum of {len(value)} rows was given for a parameter of {list(parameter.shape)}, of which this "
            f"rank holds {len(local)} rows"
        )
    return value.to(local.device)
