"""Optimizer states with a row for each row of a parameter, which are split as the parameter is."""

import torch
from torch.distributed.tensor import DTensor

from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharded_tensors import own_group, own_shard, refuse_foreign_shard

MOMENTUM_SCALES = "momentum_scales"
"""The state with the scales of 8-bit momenta. It has a row for each row of the parameter, but not the parameter's
shape."""


def rows_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter's state, which is given in full or as a shard.

    Raises:
        ValueError: it has another number of rows, or those of another rank.
    """
    mark, held = get_mark(parameter), len(parameter)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if mark is not None:
        refuse_foreign_shard(value, own_group(parameter), "a momentum")
        if len(value) != held and len(value) == mark.size:
            value = own_shard(value, mark)
    if len(value) != held:
        shape = list(parameter.shape)
        if mark is not None and mark.size is not None:
            shape[0] = mark.size
        raise ValueError(
            f"a momentum of {len(value)} rows was given for a parameter of {shape}, of which this rank holds {held} "
            "rows"
        )
    return value.to(parameter.device)
