"""A DTensor's own shard, its subclasses and its operators.

`compute_local_shape_and_global_offset`: the shape and the place in the full tensor of this rank's shard.

Why: checkpoints write shards with their places, those of strided placements included.

Checked: torch 2.11 and 2.13.

Public way: none for strided placements; arithmetic as in ``tensorshard.comm.sharding`` for others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensorshard.torch_private.tensors import mark_as_parameter

__all__ = ["compute_local_shape_and_global_offset", "local_tensor", "operator_handlers", "parameter_of_class"]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's shard, the object itself, which autograd does not follow.

    Why: an optimizer changes it in place, and keeps it from step to step.

    Checked: torch 2.11 and 2.13.

    Public way: ``to_local()`` under ``torch.no_grad()``, which makes another tensor of a parameter's at each call.
    """
    return tensor._local_tensor


def parameter_of_class(cls: type[DTensor], local: torch.Tensor, like: DTensor) -> Any:
    """A parameter of class `cls`, a subclass of DTensor, that holds `local` and is laid out as `like` is.

    Why: a head that updates its weight during backward refuses to be asked for a gradient.

    Checked: torch 2.11 and 2.13.

    Public way: ``DTensor.from_local``, which makes no subclass.
    """
    made = cls(local, like._spec, requires_grad=False)  # type: ignore[call-arg]
    mark_as_parameter(made)
    return made


def operator_handlers() -> dict[Any, Callable[..., Any]]:
    """What DTensor calls for operators with a rule of their own; changing it changes that.

    Why: ``GradScaler`` hands plain gradients and DTensors to one operator, which takes only one kind.

    Checked: torch 2.11 and 2.13.

    Public way: ``torch.distributed.tensor.experimental.register_sharding``, for placements, not for mixtures.
    """
    return DTensor._op_dispatcher._custom_op_handlers
