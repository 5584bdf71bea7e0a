"""The ``divide`` style: attributes and inputs of a module that depend on its heads are cut to this rank's heads.

Whole-number attributes are divided. So are inputs that have an entry for every head, such as the position biases
of ALiBi (Press et al. 2022), which BLOOM computes once for all of its blocks.
"""

import copy
import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.tensor_parallel.apply.local_shapes import forward_with_local_shapes
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs
from tensorshard.tensor_parallel.table.layer_kinds import signature_of
from tensorshard.tensor_parallel.table.styles import RESHAPE_SIZES, Divide, owner_of


def divide(module: nn.Module, style: Divide, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Divides attributes and inputs of `module` in place."""
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
        around = partial(_forward, signature_of(module), type(module).__name__, inputs, group)
        wrap_forward(module, Role.DIVIDED_INPUTS, around)


def _forward(
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
