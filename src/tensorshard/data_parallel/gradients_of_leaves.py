"""Gradients by whole parameters, averaged over the data ranks."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.sharding import dtensor_like
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)
_FROZEN = "One of the differentiated Tensors does not require grad"


def averaged_shard(gradient: torch.Tensor | None, parameter: DTensor, ranks: int) -> DTensor:
    """This rank's shard of the average of the data ranks' whole gradients. A collective.

    Args:
        gradient: this rank's; None for zeros.
    """
    mesh = parameter.device_mesh
    with without_torch_functions_of_tensors():
        if gradient is None:
            gradient = torch.zeros(parameter.shape, dtype=parameter.dtype, device=mesh.device_type)
        partial = DTensor.from_local(
            gradient.detach().to(mesh.device_type, parameter.dtype), mesh, [Partial()] * mesh.ndim, run_check=False
        )
        local = partial.redistribute(placements=parameter.placements).to_local()
        return dtensor_like((local / ranks).to(parameter.to_local().device), parameter)


def averaged(gradient: torch.Tensor | None, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The average of the data ranks' gradients by a `parameter` that is not sharded. A collective."""
    total = torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
    all_reduce_(total, group, what="a gradient")
    return total / group.size()


def differentiate(
    arguments: dict[str, Any],
    parameters: Container[torch.Tensor],
    leaves_of: Callable[[torch.Tensor], list[torch.Tensor]],
    group: dist.ProcessGroup,
    count: Callable[[Sequence[float]], list[float]],
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` where some inputs are `parameters`, whose gradients are averaged over the data ranks.

    Args:
        arguments: of ``torch.autograd.grad``, by name.
        leaves_of: the tensors that stand for a parameter in graphs.
        group: the data ranks.
        count: sums numbers over them.

    Raises:
        RuntimeError: as torch raises it; or the gradients would have to be differentiable, or batched.
    """
    inputs: Sequence[torch.Tensor] = arguments["inputs"]
    for field, value in (
        ("create_graph", arguments.get("create_graph")),
        ("is_grads_batched", arguments.get("is_grads_batched")),
    ):
        if value:
            raise RuntimeError(
                f"torch.autograd.grad was called with {field}=True by parameters that zero=3 shards, whose gradients "
                f"are averaged over the ranks, outside of the graph: use zero=2, where they are plain tensors, or give "
                f"the model plain weights of yours by torch.func.functional_call, and differentiate by those"
            )
    if not all(one.requires_grad for one in inputs):
        raise RuntimeError(_FROZEN)
    leaves = [leaves_of(one) if one in parameters else [one] for one in inputs]
    flat = [leaf for each in leaves for leaf in each if leaf.requires_grad]
    plain = {"materialize_grads": False, "allow_unused": True, "inputs": flat}
    found = iter(torch.autograd.grad(**{**arguments, **plain}) if flat else ())
    sums: list[torch.Tensor | None] = []
    for each in leaves:
        parts = [part for leaf in each if leaf.requires_grad and (part := next(found)) is not None]
        sums.append(sum(parts[1:], start=parts[0]) if parts else None)
    used = count([float(each is not None) for each in sums])
    materialize = arguments.get("materialize_grads", False)
    if any(number < 0.5 for number in used) and not (materialize or arguments.get("allow_unused")):
        raise RuntimeError(_UNUSED)
    results: list[torch.Tensor | None] = []
    for one, total, number in zip(inputs, sums, used, strict=True):
        if number < 0.5:
            results.append(torch.zeros_like(one) if materialize else None)
        elif one not in parameters:
            results.append(total)
        elif isinstance(one, DTensor):
            shard = averaged_shard(total, one, group.size())
            shard.__class__ = type(one)
            results.append(shard)
        else:
            results.append(averaged(total, one, group))
    return tuple(results)
