"""torch's ``GradScaler`` and ``clip_grad_norm_`` on models of which some parameters are split.

Both take the gradients of a whole model in one list. Where some are DTensors and some are plain tensors, torch refuses
them: it does not know what the plain ones are to the others' ranks. Beside a model-parallel group they are copies.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.sharding import to_local


def unscaling_of_mixture(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_`` of a list in which there is a DTensor.

    An overflow in any rank's part is everybody's, so that all skip the step. (torch's own handler takes from the first
    gradient of the list over whom to ask; if that is replicated, the ranks part company without a word.)

    Args:
        op_call, args, kwargs: as DTensor's dispatcher hands them on: gradients, found_inf, inverse scale.
    """
    gradients, found_inf, inverse_scale = args
    op_call([to_local(gradient) for gradient in gradients], found_inf, inverse_scale, **kwargs)
    for group in _split_over(gradients):
        all_reduce_(found_inf, group, dist.ReduceOp.MAX)


def total_norm_of_mixture(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.nn.utils.get_total_norm`` that also takes DTensors and plain tensors in one list.

    Args:
        original: torch's, which is called for the tensors of each mesh, and for the plain ones.

    Returns:
        A function that returns torch's own result for tensors of one kind, and for a mixture a plain tensor, equal on
        every rank.
    """

    @torch.no_grad()
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        kinds = _by_mesh(listed, listed)
        if not _is_mixture(kinds):
            return original(listed, norm_type, error_if_nonfinite, foreach)
        norms = [original(alike, norm_type, error_if_nonfinite, foreach) for alike in kinds.values()]
        plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return torch.linalg.vector_norm(torch.stack([norm.to(plain[0].device) for norm in plain]), float(norm_type))

    return total_norm


def clipping_of_mixture(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.nn.utils.clip_grads_with_norm_`` that also takes parameters of both kinds.

    Args:
        original: torch's, which is called for the parameters of each mesh, and for the others.
    """

    @torch.no_grad()
    def clip(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with_gradient = [parameter for parameter in listed if parameter.grad is not None]
        kinds = _by_mesh(with_gradient, [parameter.grad for parameter in with_gradient])
        if not _is_mixture(kinds):
            return original(listed, max_norm, total_norm, foreach)
        for alike in kinds.values():
            original(alike, max_norm, total_norm, foreach)
        return None

    return clip


def _by_mesh(items: list[torch.Tensor], tensors: list[Any]) -> dict[DeviceMesh | None, list[torch.Tensor]]:
    """`items` by the mesh of the tensor that goes with each; None for plain ones."""
    kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for item, tensor in zip(items, tensors, strict=True):
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(item)
    return kinds


def _is_mixture(kinds: dict[DeviceMesh | None, list[torch.Tensor]]) -> bool:
    return None in kinds and len(kinds) > 1


def _split_over(tensors: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The groups over which any of `tensors` is split, in the order of the list, which is that of every rank."""
    found: dict[str, dist.ProcessGroup] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                if not isinstance(placement, Replicate):
                    group = tensor.device_mesh.get_group(axis)
                    found.setdefault(group.group_name, group)
    return list(found.values())
