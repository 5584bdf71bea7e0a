"""Marking activations inside ``nn.Sequential``."""

from typing import TypeVar

import torch
from torch import nn

from tensorshard.comm.groups import Group, resolve_mesh
from tensorshard.comm.marks import register_parallel_dim

Marked = TypeVar("Marked", torch.Tensor, tuple, list)


class RegisterParallelDim(nn.Module):
    """Marks the tensors that pass through as split along `dim`; with None, as full. Their values do not change.

    The result of an operation carries no mark. So this module follows the operations between a layer that splits its
    output features and a layer that takes split input features.

    Args:
        dim: the dimension of the tensors that is split; None for full tensors.
        group: the ranks that hold the shards, if they are not the model-parallel group.

    Raises:
        TypeError: `group` is neither a process group nor a mesh.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> column, row = ts.nn.ParallelLinear(16, 64, dim=1), ts.nn.ParallelLinear(64, 16, dim=0)
        >>> mlp = torch.nn.Sequential(column, torch.nn.GELU(), ts.nn.RegisterParallelDim(-1), row)
        >>> mlp(torch.randn(8, 16)).shape
        torch.Size([8, 16])
    """

    def __init__(self, dim: int | None = None, group: Group | None = None) -> None:
        super().__init__()
        self.dim = dim
        self._mesh = None if group is None else resolve_mesh(group)

    def forward(self, input: Marked) -> Marked:
        """Marks a tensor, or each tensor of a tuple or list, and returns what it was given.

        Raises:
            TypeError: `input` is none of these.
            IndexError: a tensor has no dimension `dim`.
        """
        tensors = [input] if isinstance(input, torch.Tensor) else input
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise TypeError(f"RegisterParallelDim was given a {type(input).__name__}: it marks tensors")
        group = None if self._mesh is None else self._mesh.get_group()
        for tensor in tensors:
            register_parallel_dim(tensor, self.dim, group=group)
        return input

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
