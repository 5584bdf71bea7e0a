"""Modules with changed parameters, inputs, outputs or attributes: what the styles for modules and parameters do."""

import copy
import inspect
from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.sharding import to_local
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.tensor_parallel.apply.local_shapes import forward_with_local_shapes
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs
from tensorshard.tensor_parallel.table.layer_kinds import keep_own_channels, signature_of
from tensorshard.tensor_parallel.table.styles import (
    DIVIDED,
    RESHAPE_SIZES,
    Channels,
    Divide,
    Replicate,
    Sum,
    owner_of,
)
from tensorshard.torch_private.modules import own_parameters, refresh_recurrent_weights, set_parameter
from tensorshard.torch_private.pytree import tree_map_only


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
    parameters = {name: own[name] for name in names}
    try:
        for name, parameter in parameters.items():
            copied = collectives.copy(to_local(parameter), group)
            set_parameter(module, name, copied / group.size() if name in divided else copied)
        return forward(*args, **kwargs)
    finally:
        for name, parameter in parameters.items():
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
    places = []
    for name, (dim, size) in sizes.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((owner, key, own_parameters(owner)[key], dim, size))
    try:
        for owner, key, parameter, dim, size in places:
            set_parameter(owner, key, collectives.gather(to_local(parameter), dim, group, size=size))
        refresh_recurrent_weights(module)
        return forward(*args, **kwargs)
    finally:
        for owner, key, parameter, _, _ in places:
            set_parameter(owner, key, parameter)
        refresh_recurrent_weights(module)


def sum_own_gradients(module: nn.Module, style: Replicate, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes `module` sum the gradients of all of its own parameters, if the style says so."""
    if style.sums_gradients:
        names = list(own_parameters(module))
        sum_gradients(module, names, names if style == DIVIDED else (), group)


def split_channels(module: nn.Module, style: Channels, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes a module that computes channel by channel do so for this rank's channels."""
    keep_own_channels(module, group.rank(), group.size(), style.parts)


def sum_output(module: nn.Module, _style: Sum, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes `module` return the sum over the ranks of what its forward returns."""
    wrap_forward(module, Role.SUMMED_OUTPUT, partial(_forward_summing_output, group))


def _forward_summing_output(group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    def given(tensor: torch.Tensor) -> torch.Tensor:
        return collectives.copy(tensor, group) if tensor.requires_grad else tensor

    args, kwargs = tree_map_only(torch.Tensor, given, (args, kwargs))
    return tree_map_only(torch.Tensor, lambda part: collectives.reduce(part, group), forward(*args, **kwargs))


# -- divided attributes and inputs --


def divide(module: nn.Module, style: Divide, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Divides attributes and inputs of `module` that depend on its heads, in place.

    Inputs that have an entry for every head are such as the position biases of ALiBi (Press et al. 2022), which BLOOM
    computes once for all of its blocks.
    """
    attributes: dict[str, int] = {}
    inputs: dict[str, tuple[int, int | None]] = {}
    for option in style.targets:
        if option == RESHAPE_SIZES:
            wrap_forward(module, Role.LOCAL_SHAPES, partial(forward_with_local_shapes, group.size()))
            continue
        target, _, divisor = option.partition("/")
        if target.startswith("input."):
            _, argument, dim = target.split(".")
            inputs[argument] = (int(dim), _read(module, divisor) if divisor else None)
        else:
            attributes[target] = _read(module, target) // (int(divisor) if divisor else group.size())
    if any(target.startswith("config.") for target in attributes):
        module.config = copy.copy(module.config)  # type: ignore[assignment, arg-type]  # other modules read it too
    for target, value in attributes.items():
        owner, key = owner_of(module, target)
        setattr(owner, key, value)
    if inputs:
        around = partial(_forward_on_own_heads, signature_of(module), type(module).__name__, inputs, group)
        wrap_forward(module, Role.DIVIDED_INPUTS, around)


def _forward_on_own_heads(
    signature: inspect.Signature,
    name: str,
    inputs: dict[str, tuple[int, int | None]],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `forward` with this rank's heads of some of its inputs."""
    bound = signature.bind(*args, **kwargs)
    extra = next((p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), "")
    for argument, (dim, heads) in inputs.items():
        # Arguments that only **kwargs takes are in a dict under that parameter's name.
        holder = bound.arguments if argument in signature.parameters else bound.arguments.get(extra, {})
        if argument not in holder and argument not in signature.parameters:
            raise ValueError(f"{name} was not given an input {argument!r}, whose heads are to be divided")
        given = holder.get(argument)
        if isinstance(given, torch.Tensor):
            holder[argument] = _own_heads(given, dim, heads, group, f"{name}'s input {argument!r}")
    return forward(*bound.args, **bound.kwargs)


def _own_heads(given: torch.Tensor, dim: int, heads: int | None, group: dist.ProcessGroup, what: str) -> torch.Tensor:
    if heads is None:
        if given.ndim <= dim or given.size(dim) % group.size():
            raise ValueError(
                f"{what} has the shape {list(given.shape)}; along dimension {dim} it must have an entry for each head, "
                f"which {group.size()} ranks can divide"
            )
        return collectives.scatter(given, dim, group)
    if given.ndim <= dim or given.size(dim) % heads:
        raise ValueError(
            f"{what} has the shape {list(given.shape)}; along dimension {dim} it must have an entry for each of "
            f"{heads} heads, or for each sample and head"
        )
    by_head = given.unflatten(dim, (-1, heads))
    return collectives.scatter(by_head, dim + 1, group).flatten(dim, dim + 1)


def _read(module: nn.Module, attribute: str) -> int:
    owner, key = owner_of(module, attribute)
    value: int = getattr(owner, key)
    return value
