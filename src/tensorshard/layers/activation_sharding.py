"""How activations are laid out between split linear layers: in full on every rank, or as shards of the sequence.

A column layer gathers its input and a row layer reduces its output; in backward each does what the other does in
forward (f and g of Shoeybi et al. 2019, section 3; with the sequence split, Korthikanti et al. 2022, section 4.2.2).
The same bytes travel either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tensorshard.comm import differentiable as collectives
from tensorshard.comm import primitives
from tensorshard.comm.marks import set_mark
from tensorshard.comm.primitives import Started
from tensorshard.comm.sharding import shard_sizes
from tensorshard.torch_private.dispatch import has_dispatch_mode


@dataclass(frozen=True)
class Replicated:
    """Every rank has all of an activation: nothing is gathered, and a reduction is an all-reduce."""

    group: dist.ProcessGroup

    def full_shape(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of what :meth:`gather` returns for `tensor`."""
        return tensor.shape

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself, which is full."""
        return tensor

    def start_gather(self, tensor: torch.Tensor) -> Started:
        """`tensor` itself, in the form of a collective under way."""
        return Started(None, lambda: tensor)

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; `tensor` is overwritten unless selective recomputation may have kept it."""
        if has_dispatch_mode():
            tensor = tensor.clone()
        primitives.all_reduce(tensor, self.group)
        return tensor

    def start_reduce(self, tensor: torch.Tensor) -> Started:
        """Begins to sum `tensor` over the ranks, in place."""
        return Started(primitives.all_reduce(tensor, self.group, async_op=True), lambda: tensor)

    def differentiable_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`gather`, for computations that differ by rank; in a graph for another backward."""
        return collectives.copy(tensor, self.group)

    def differentiable_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`reduce`, in a graph for another backward."""
        return collectives.reduce(tensor, self.group)


@dataclass(frozen=True)
class SequenceSharded:
    """Every rank has its shard of the positions: a gather is an all-gather, and a reduction a reduce-scatter.

    Args:
        dim: the dimension of the positions.
        sizes: how many of them each rank has.
    """

    dim: int
    sizes: Sequence[int]
    group: dist.ProcessGroup

    @classmethod
    def of_length(cls, dim: int, length: int, group: dist.ProcessGroup) -> "SequenceSharded":
        """The shards of a sequence of `length` positions."""
        return cls(dim, shard_sizes(length, group.size()), group)

    def full_shape(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of what :meth:`gather` returns for `tensor`."""
        shape = list(tensor.shape)
        shape[self.dim] = sum(self.sizes)
        return torch.Size(shape)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All positions."""
        return primitives.gather_dim(tensor, self.dim, self.sizes, self.group)

    def start_gather(self, tensor: torch.Tensor) -> Started:
        """Begins to gather all positions."""
        return primitives.start_gather_dim(tensor, self.dim, self.sizes, self.group)

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's positions of the sum over the ranks."""
        return primitives.reduce_scatter_dim(tensor, self.dim, self.sizes, self.group)

    def start_reduce(self, tensor: torch.Tensor) -> Started:
        """Begins to sum over the ranks. This rank gets its own positions of the sum."""
        return primitives.start_reduce_scatter_dim(tensor, self.dim, self.sizes, self.group)

    def differentiable_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`gather`, for computations that differ by rank; in a graph for another backward."""
        return collectives.gather_for_sum(tensor, self.dim, self.group, size=sum(self.sizes))

    def differentiable_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`reduce`, in a graph for another backward."""
        return set_mark(collectives.reduce_scatter(tensor, self.dim, self.group), None)


ActivationSharding = Replicated | SequenceSharded
