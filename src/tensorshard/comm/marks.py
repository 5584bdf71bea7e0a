"""Marks on activations: along which dimension a plain tensor is split over a model-parallel group.

Activations are plain tensors, so that computing on them costs no dispatch; what a layer knows about its
output (that it is a shard, of what, over whom) travels as an attribute of the tensor object, as in
TorchShard. An operation's result carries no mark, even where the operation is element by element: put it back
with :func:`register_parallel_dim` or :class:`tensorshard.nn.RegisterParallelDim`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

_ATTRIBUTE = "_tensorshard_mark"


@dataclass(frozen=True)
class ParallelMark:
    """What is known of a shard.

    Args:
        dim: the dimension along which the tensor is split.
        size: elements of the whole tensor along `dim`, if known.
        group: the ranks that hold the parts, if known.
    """

    dim: int
    size: int | None = None
    group: dist.ProcessGroup | None = None


def get_mark(tensor: torch.Tensor) -> ParallelMark | None:
    """The mark that `tensor` carries, or None for a whole tensor."""
    return getattr(tensor, _ATTRIBUTE, None)


def set_mark(tensor: torch.Tensor, mark: ParallelMark | None) -> torch.Tensor:
    """Puts `mark` on `tensor`, or takes it off; returns `tensor`."""
    if mark is not None:
        setattr(tensor, _ATTRIBUTE, mark)
    elif hasattr(tensor, _ATTRIBUTE):
        delattr(tensor, _ATTRIBUTE)
    return tensor


def get_parallel_dim(tensor: torch.Tensor) -> int | None:
    """Along which dimension `tensor` is split, or None if it is whole.

    For a parameter of a parallel layer this is the dimension of the parameter itself: a layer that splits its
    output features holds a weight [out_features, in_features] that is split along 0.
    """
    if isinstance(tensor, DTensor):
        return next((p.dim for p in tensor.placements if isinstance(p, Shard)), None)
    mark = get_mark(tensor)
    return None if mark is None else mark.dim


def register_parallel_dim(
    tensor: torch.Tensor,
    dim: int | None = None,
    *,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Says that `tensor` is a shard, split along `dim`; or, with None, that it is whole.

    Args:
        tensor: marked in place.
        size: elements of the whole tensor along `dim`. Where it is not given, what needs it asks the other
            ranks.
        group: the ranks that hold the parts; by default those of the layer or loss that reads the mark.

    Returns:
        The same tensor.

    Raises:
        IndexError: the tensor has no dimension `dim`.
        TypeError: a DTensor, whose placements already say how it is split.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"register_parallel_dim was given a {type(tensor).__name__}, where a tensor was expected")
    if isinstance(tensor, DTensor):
        raise TypeError(f"a DTensor says by its placements {tensor.placements} how it is split: it takes no mark")
    if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
        raise IndexError(f"dim={dim} was given for a tensor of {tensor.ndim} dimensions")
    return set_mark(tensor, None if dim is None else ParallelMark(dim, size, group))
