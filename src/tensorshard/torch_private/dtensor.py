"""Where a DTensor's shard lies in the full tensor, and DTensors whose shards are on another device.

`compute_local_shape_and_global_offset`: the shape of this rank's shard, and its place in the full tensor.

Why: checkpoints write shards with their places, including those of strided placements.

Checked: torch 2.13 and 2.15.

Public way: none for strided placements; arithmetic as in ``tensorshard.comm.sharding`` for others.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensorshard.torch_private.dispatch import WithoutTorchFunctions

__all__ = [
    "DTensorWithDirectHooks",
    "compute_local_shape_and_global_offset",
    "direct_attribute",
    "dtensor_laid_out_as",
    "dtensor_of",
    "shard_of",
]


def direct_attribute(name: str) -> property:
    """DTensor's attribute `name`, for a subclass whose ``__torch_function__`` is not to be asked for it.

    Why: the code of every step reads some attributes of each parameter, and a call of ``__torch_function__`` takes
    microseconds.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    attribute: Any = getattr(DTensor, name)

    def get(self: DTensor) -> Any:
        with WithoutTorchFunctions():
            return attribute.__get__(self)

    def set_(self: DTensor, value: Any) -> None:
        with WithoutTorchFunctions():
            attribute.__set__(self, value)

    return property(get, set_)


class DTensorWithDirectHooks(DTensor):
    """A DTensor of which autograd's and the optimizers' code reads hooks without ``__torch_function__``.

    Why: as for :func:`direct_attribute`.

    Checked: torch 2.13 and 2.15.

    Public way: none; these attributes have private names alone.
    """

    _backward_hooks = direct_attribute("_backward_hooks")
    _post_accumulate_grad_hooks = direct_attribute("_post_accumulate_grad_hooks")


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The DTensor of `shape` whose shard on this rank is `local`, on any device.

    Why: offloaded masters are in host memory, while their mesh is one of GPUs.

    Checked: torch 2.13 and 2.15.

    Public way: ``DTensor.from_local``, which copies the shard to the mesh's device.
    """
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local.detach(), spec, requires_grad=False)


def dtensor_laid_out_as(local: torch.Tensor, like: DTensor) -> DTensor:
    """The DTensor laid out as `like` is, whose shard on this rank is `local`, of the same type and on any device.

    Why: a description of its own takes longer to make than all the rest of a shard's gradient.

    Checked: torch 2.13 and 2.15.

    Public way: ``DTensor.from_local``, as for :func:`dtensor_of`.
    """
    return _new_dtensor(DTensor, local.detach(), like._spec, requires_grad=False)  # type: ignore[no-any-return]


# DTensor's constructor as it is without the guard that torch.compile needs around it, which takes longer than the rest.
_new_dtensor: Any = getattr(DTensor.__new__, "__wrapped__", DTensor.__new__)


def layouts_of(values: Iterable[Any]) -> list[object]:
    """Of each DTensor in `values`, the description of how it is laid out, which others may share.

    Why: those of all weights, gradients and states are compared in each update. The same objects as in the update
    before need no look at their meshes and placements.

    Checked: torch 2.13 and 2.15.

    Public way: ``value.device_mesh`` and ``value.placements``, which say the same and take longer to compare.
    """
    return [value._spec for value in values if isinstance(value, DTensor)]


def shards_of(values: Iterable[Any]) -> list[Any]:
    """:func:`shard_of` each.

    Why: each update looks at all weights, gradients and states, and a call for each takes longer than the look.

    Checked: torch 2.13 and 2.15.

    Public way: as for :func:`shard_of`.
    """
    return [value._local_tensor if isinstance(value, DTensor) else value for value in values]


def shard_of(value: Any) -> Any:
    """This rank's shard of a DTensor itself, not a view of it; any other value as it is.

    Why: the shard is read after every operator that an estimate runs, and a view would be one more operator.

    Checked: torch 2.13 and 2.15.

    Public way: ``value.to_local()``, which makes a view wherever gradients are recorded.
    """
    return value._local_tensor if isinstance(value, DTensor) else value
