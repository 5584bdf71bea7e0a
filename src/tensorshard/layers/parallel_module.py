"""The base class of layers with split parameters, also of your own."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm.collectives import broadcast_
from tensorshard.comm.groups import Group, resolve_mesh
from tensorshard.comm.marks import _PARALLEL_DIM, ParallelMark, get_layout, set_mark
from tensorshard.comm.sharded_tensors import own_shard, refuse_foreign_shard, say_whose
from tensorshard.comm.sharding import normalize_dim, shard_range
from tensorshard.torch_private.modules import ConvertibleModule, own_parameters

# All layers that exist. A layer knows how its parameters are split, also when FSDP2 has replaced them.
_layers: "WeakSet[ParallelModule]" = WeakSet()


@dataclass(frozen=True)
class _Layout:
    """How a parameter is split. The layer keeps this for its lifetime, also when the parameter object is replaced.

    Args:
        dim: the dimension along which it is split; None for one that every rank holds in full.
        shape: of the full parameter.
    """

    dim: int | None
    shape: tuple[int, ...]


class ParallelModule(ConvertibleModule):
    """A module whose parameters are split over, or replicated on, the ranks of a group.

    Parameters are plain tensors, this rank's shards, marked as shards (:func:`tensorshard.get_parallel_dim`). The
    forward of a subclass computes on them, and calls the collectives of ``tensorshard.distributed`` that it needs.
    ``load_state_dict`` takes full tensors as well as shards.

    Args:
        dim: what the layer splits, in its own terms; None for a layer that splits nothing and needs no group.
        group: a process group or a one-dimensional mesh; by default the model-parallel group.

    Raises:
        RuntimeError: `dim` is given, `group` is not, and there is no model-parallel group.

    Examples:
        >>> class Scale(ts.nn.ParallelModule):
        ...     def __init__(self, features, group=None):
        ...         super().__init__(1, group)
        ...         self.weight = self.split(torch.nn.Parameter(torch.ones(features)), 0)
        ...     def forward(self, x):
        ...         shard = ts.distributed.scatter(x, -1, self.group)
        ...         return ts.distributed.gather(shard * self.weight, -1, self.group)
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> layer = Scale(16)
        >>> layer.weight.shape, layer(torch.randn(8, 16)).shape
        (torch.Size([8]), torch.Size([8, 16]))
    """

    def __init__(self, dim: int | None, group: Group | None = None) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_take_own_shards)
        self.register_state_dict_post_hook(_say_whose_shards)
        self.dim = dim
        self._mesh = None if dim is None else resolve_mesh(group)
        self._layouts: dict[str, _Layout] = {}
        _layers.add(self)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold the parameters, as a mesh.

        Raises:
            RuntimeError: the layer splits nothing.
        """
        if self._mesh is None:
            raise RuntimeError(f"this {type(self).__name__} has dim=None: it splits nothing and has no group")
        return self._mesh

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the parameters.

        Raises:
            RuntimeError: the layer splits nothing.
        """
        return self.mesh.get_group()

    def split(self, full: torch.Tensor, dim: int) -> nn.Parameter:
        """Makes a parameter of which every rank holds its shard along `dim`. The memory of `full` is not kept.

        Args:
            full: the full values, the same on every rank.
            dim: counted from either end.

        Raises:
            IndexError: `full` has no dimension `dim`.
        """
        dim, size = normalize_dim(dim, full.ndim), full.size(dim)
        return self._marked(own_shard(full.detach(), ParallelMark(dim, size, self.group)), dim, size, full)

    def replicate(self, full: torch.Tensor) -> nn.Parameter:
        """Makes a parameter that every rank holds in full, with the values of the group's first rank."""
        parameter = self._marked(full.detach().clone(memory_format=torch.contiguous_format), None, None, full)
        if self.mesh.size() > 1 and type(full) in (torch.Tensor, nn.Parameter) and not full.is_meta:
            broadcast_(parameter, self.group)
        return parameter

    def layout_of(self, name: str) -> ParallelMark | None:
        """How the parameter `name` is split; None if it did not come from :meth:`split` or :meth:`replicate`."""
        layout = self._layouts.get(name)
        if layout is None:
            return None
        size = None if layout.dim is None else layout.shape[layout.dim]
        return ParallelMark(layout.dim, size, self.group, self.dim)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        mark = None if param is None or self._mesh is None else get_layout(param)
        if param is not None and mark is not None:
            shape = list(param.shape)
            if mark.dim is None:
                self._layouts[name] = _Layout(None, tuple(shape))
            elif mark.size is not None:
                shape[mark.dim] = mark.size
                self._layouts[name] = _Layout(mark.dim, tuple(shape))
        self._mark(name)

    def after_conversion(self) -> None:
        super().after_conversion()
        self._mark_all()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _layers.add(self)
        self._mark_all()  # torch copies and saves parameters without their attributes

    def _marked(self, shard: torch.Tensor, dim: int | None, size: int | None, full: torch.Tensor) -> nn.Parameter:
        if shard.device.type not in (self.mesh.device_type, "meta"):
            shard = shard.to(self.mesh.device_type)
        parameter = nn.Parameter(shard, requires_grad=full.requires_grad)
        set_mark(parameter, ParallelMark(dim, size, self.group, self.dim))
        return parameter

    def _mark_all(self) -> None:
        for name in own_parameters(self):
            self._mark(name)

    def _mark(self, name: str) -> None:
        """Marks a parameter that was assigned, copied or converted in the way of the one that it replaces."""
        parameter, layout = own_parameters(self).get(name), self.layout_of(name)
        if parameter is None or isinstance(parameter, DTensor):
            return
        if layout is None:
            if not hasattr(parameter, _PARALLEL_DIM):
                setattr(parameter, _PARALLEL_DIM, None)  # what TorchShard's layers have, and its users read
        elif get_layout(parameter) != layout and tuple(parameter.shape) == self._shape_held(name):
            set_mark(parameter, layout)

    def _shape_held(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's shard of the parameter `name`."""
        dim, shape = self._layouts[name].dim, list(self._layouts[name].shape)
        if dim is not None:
            shape[dim] = shard_range(shape[dim], self.group.size(), self.group.rank())[1]
        return tuple(shape)


def layout_of(tensor: torch.Tensor) -> ParallelMark | None:
    """How a parameter or buffer is split; also where FSDP2 has made a parallel layer's parameter a DTensor."""
    if not isinstance(tensor, DTensor):
        return get_layout(tensor)
    for layer in list(_layers):
        for name, parameter in own_parameters(layer).items():
            if parameter is tensor:
                return layer.layout_of(name)
    return None


def _take_own_shards(module: ParallelModule, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: puts this rank's shards in place of the full tensors of split parameters."""
    for name, layout in module._layouts.items():
        value, parameter = state_dict.get(prefix + name), own_parameters(module).get(name)
        if not isinstance(value, torch.Tensor) or isinstance(parameter, DTensor):
            continue
        if isinstance(value, DTensor):
            split = tuple(value.placements) == (Shard(layout.dim),) if layout.dim is not None else False
            value = value.to_local() if split and value.device_mesh == module.mesh else value.full_tensor()
            state_dict[prefix + name] = value
        if layout.dim is not None:
            refuse_foreign_shard(value, module.group, prefix + name)
            if tuple(value.shape) == layout.shape:  # a tensor of another shape is left for torch to report
                state_dict[prefix + name] = own_shard(value, module.layout_of(name))


def _say_whose_shards(module: ParallelModule, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, layout in module._layouts.items():
        value = state_dict.get(prefix + name)
        if layout.dim is not None and type(value) is torch.Tensor:
            say_whose(value, module.group)
