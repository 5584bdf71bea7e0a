"""Parameters of which each rank keeps a slice. They are gathered whenever their module is called.

This is for what tensor parallelism cannot split otherwise: recurrent layers, tables of positions, parameters that a
forward uses in its own way. All ranks compute the same with them. So each rank has the whole gradient, and takes its
slice of it: nothing is communicated in backward.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.sharding import to_local
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.torch_private.modules import own_parameters, refresh_recurrent_weights, set_parameter


def gather_parameters(module: nn.Module, dims: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Makes the forward of `module` run on full parameters.

    Args:
        dims: names of the parameters that are kept in slices, each with its dimension. They are still full.
    """
    sizes = {name: (dim, module.get_parameter(name).shape[dim]) for name, dim in dims.items()}
    wrap_forward(module, Role.GATHERED_PARAMETERS, partial(_forward, module, sizes, group))


def _forward(
    module: nn.Module,
    sizes: Mapping[str, tuple[int, int]],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    held = []
    for name, (dim, size) in sizes.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        held.append((owner, key, own_parameters(owner)[key], dim, size))
    try:
        for owner, key, parameter, dim, size in held:
            set_parameter(owner, key, collectives.gather(to_local(parameter), dim, group, size=size))
        refresh_recurrent_weights(module)
        return forward(*args, **kwargs)
    finally:
        for owner, key, parameter, _, _ in held:
            set_parameter(owner, key, parameter)
        refresh_recurrent_weights(module)
