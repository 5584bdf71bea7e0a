"""Parameters that a forward sees changed: gathered from the ranks, or with gradients that are summed over them."""

from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.sharding import to_local
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.torch_private.modules import own_parameters, refresh_recurrent_weights, set_parameter


def sum_gradients(module: nn.Module, names: Iterable[str], divided: Container[str], group: dist.ProcessGroup) -> None:
    """Makes `module` sum the gradients of its own parameters `names` over the ranks, which have different activations.

    Args:
        divided: names of the parameters to divide by the number of ranks: each rank adds these to its part of a sum.
    """
    wrap_forward(module, Role.SUMMED_GRADIENTS, partial(_summing_forward, module, list(names), divided, group))


def _summing_forward(
    module: nn.Module,
    names: list[str],
    divided: Container[str],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
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


def gather_parameters(module: nn.Module, dims: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Makes the forward of `module` run on full parameters, of which each rank keeps a slice.

    This is for what tensor parallelism cannot split otherwise: recurrent layers, tables of positions, parameters that a
    forward uses in its own way. All ranks compute the same with them. So each rank has the full gradient, and takes
    its slice of it: nothing is communicated in backward.

    Args:
        dims: names of the parameters, each with the dimension that is sliced. They are still full.
    """
    sizes = {name: (dim, module.get_parameter(name).shape[dim]) for name, dim in dims.items()}
    wrap_forward(module, Role.GATHERED_PARAMETERS, partial(_gathering_forward, module, sizes, group))


def _gathering_forward(
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
