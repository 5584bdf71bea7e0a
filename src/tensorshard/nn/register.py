"""Marking activations inside ``nn.Sequential``."""

from typing import TypeVar

import torch
from torch import nn

from tensorshard.comm.groups import Group, resolve_mesh
from tensorshard.comm.marks import register_parallel_dim

Marked = TypeVar("Marked", torch.Tensor, tuple, list)


class RegisterParallelDim(nn.Module):
    """Marks what passes through as split along `dim`; with None, as whole. Changes nothing else.

    Needed after operations between a layer that splits its output features and one that takes split input
    features, since an operation's result carries no mark: ``Sequential(ParallelLinear(d, 4 * d, dim=1),
    GELU(), RegisterParallelDim(-1), ParallelLinear(4 * d, d, dim=0))``.

    Args:
        dim: as in :func:`tensorshard.register_parallel_dim`.
        group: the ranks that hold the parts, if they are not the model-parallel group.
    """

    def __init__(self, dim: int | None = None, group: Group | None = None) -> None:
        super().__init__()
        self.dim = dim
        self._mesh = None if group is None else resolve_mesh(group)

    def forward(self, input: Marked) -> Marked:
        """Takes a tensor, or a tuple or list of them, and returns it.

        Raises:
            TypeError: `input` is neither.
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
