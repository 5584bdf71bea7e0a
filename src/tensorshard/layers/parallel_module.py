"""What layers with split parameters have in common; the base for layers of one's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tensorshard.comm.groups import Group, resolve_mesh
from tensorshard.comm.sharding import distribute, distribute_like, normalize_dim


class ParallelModule(nn.Module):
    """A module whose parameters are split over, or replicated on, the ranks of a group.

    Parameters are DTensors, which is what FSDP2, ``torch.distributed.checkpoint`` and optimizers understand;
    forward is to compute on ``parameter.to_local()`` and to place collectives of
    :mod:`tensorshard.distributed` by hand. ``load_state_dict`` takes whole tensors as well as DTensors.

    Args:
        dim: what the layer splits, in its own terms; None for a layer that splits nothing and needs no group.
        group: the ranks: a process group or a one-dimensional mesh; by default the model-parallel group.

    Raises:
        RuntimeError: `dim` is given, `group` is not, and there is no model-parallel group.
    """

    def __init__(self, dim: int | None, group: Group | None = None) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_distribute_full_tensors)
        self.dim = dim
        self._mesh = None if dim is None else resolve_mesh(group)

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

    def split(self, whole: torch.Tensor, dim: int) -> nn.Parameter:
        """A parameter of which every rank holds a part, cut along `dim`. The memory of `whole` is not kept.

        Args:
            whole: what the parameter is to be, the same on every rank.
            dim: counted from either end.
        """
        placements = [Shard(normalize_dim(dim, whole.ndim))]
        return nn.Parameter(distribute(whole, self.mesh, placements), requires_grad=whole.requires_grad)

    def replicate(self, whole: torch.Tensor) -> nn.Parameter:
        """A parameter that every rank holds whole, with the values of the group's first rank."""
        copy = distribute(whole, self.mesh, [Replicate()])
        local = copy.to_local()
        if self.mesh.size() > 1 and type(local) is torch.Tensor and not local.is_meta:
            dist.broadcast(local, group_src=0, group=self.group)
        return nn.Parameter(copy, requires_grad=whole.requires_grad)


def _distribute_full_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded, gives a parameter that is split this rank's part of what is there in full."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        # A tensor of another shape is left for torch to report.
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            state_dict[prefix + name] = distribute_like(value, parameter)
