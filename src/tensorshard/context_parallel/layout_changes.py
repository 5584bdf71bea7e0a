"""From one layout to another: whole tensors, cut ones, the same positions elsewhere, another dimension."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.context_group import Activation, ContextGroup, active
from tensorshard.context_parallel.exchanges import fetch, take, turn
from tensorshard.context_parallel.layouts import SequenceLayout, contiguous, elsewhere
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.torch_private.pytree import tree_map, tree_tensors
from tensorshard.torch_private.tensors import tensor_version


def cut(tensor: torch.Tensor, dim: int, layout: SequenceLayout | None = None) -> SequenceTensor:
    """This rank's positions of a whole tensor.

    Args:
        tensor: the same on all ranks.
        dim: the dimension of the positions.
        layout: which rank holds which; by default contiguous parts.

    Raises:
        RuntimeError: this is called outside of ``ContextGroup.active``.
        ValueError: the layout is of another length or number of ranks, or there is only one position.
    """
    activation = _activation()
    group: ContextGroup = activation.group
    dim = dim % tensor.ndim
    if tensor.shape[dim] < 2:
        raise ValueError(f"dimension {dim} of a tensor of shape {list(tensor.shape)} is too short to be cut over ranks")
    layout = layout or contiguous(tensor.shape[dim], group.size)
    if layout.length != tensor.shape[dim] or layout.ranks != group.size:
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} was to be cut along dimension {dim} over {group.size} ranks by a "
            f"layout of {layout.length} positions over {layout.ranks} ranks"
        )
    activation.layouts.setdefault(layout.length, layout)
    return cut_for(tensor, dim, layout, group)


def from_local(local: torch.Tensor, dim: int, layout: SequenceLayout) -> SequenceTensor:
    """A sequence tensor of this rank's positions, in the layout's order.

    Raises:
        RuntimeError: this is called outside of ``ContextGroup.active``.
    """
    activation = _activation()
    activation.layouts.setdefault(layout.length, layout)
    return SequenceTensor(local, dim % local.ndim, layout, activation.group)


def _activation() -> Activation:
    activation = active()
    if activation is None:
        raise RuntimeError("sequences are cut and joined inside of `with group.active():`")
    return activation


def whole(tree: Any) -> Any:
    """A nest of tensors with whole, plain ones in place of sequence tensors; differentiable. All ranks have to call
    it."""
    return tree_map(lambda leaf: gathered(leaf, "whole"), tree)


def cut_for(tensor: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup) -> SequenceTensor:
    """As :func:`cut`, without checks."""
    index = layout.index(group.rank)
    local = take(tensor, dim, index)
    # A slice would keep the memory of the whole tensor.
    return SequenceTensor(local.clone() if isinstance(index, slice) else local, dim, layout, group)


def gathered(tensor: Any, what: str) -> torch.Tensor:
    """The whole tensor, a plain one. It is kept as long as the sequence tensor lives and nobody writes to that."""
    if not isinstance(tensor, SequenceTensor):
        return tensor  # type: ignore[no-any-return]
    kept, version = tensor._gathered, tensor.version
    needs_graph = torch.is_grad_enabled() and tensor.local.requires_grad
    if kept is None or kept[1] != version or (needs_graph and not kept[0].requires_grad):
        values = fetch(tensor.local, tensor.split_dim, tensor.sequence, None, what, tensor.group)
        kept = tensor._gathered = values, version, tensor_version(values)
    return kept[0]


def is_gathered(tensor: SequenceTensor) -> bool:
    """Whether the whole tensor is there already, and needs no exchange."""
    return tensor._gathered is not None and tensor._gathered[1] == tensor.version


def part_of(
    tensor: torch.Tensor, dim: int | None, layout: SequenceLayout, what: str, group: ContextGroup
) -> torch.Tensor:
    """This rank's part of `tensor` if its dimension `dim` is laid out as `layout`; all of it if `dim` is None."""
    if isinstance(tensor, SequenceTensor):
        if dim is not None and tensor.split_dim == dim:
            if tensor.sequence.key == layout.key:
                return tensor.local
            return fetch(tensor.local, dim, tensor.sequence, layout, what + ": realign", group)
        if dim is not None and not is_gathered(tensor):
            return turn(tensor.local, tensor.split_dim, tensor.sequence, dim, layout, what + ": turn", group)
        tensor = gathered(tensor, what)
    return tensor if dim is None else take(tensor, dim, layout.index(group.rank))


def aligned(tensor: torch.Tensor, lead: SequenceTensor, what: str) -> torch.Tensor:
    """This rank's part of a tensor that broadcasts against `lead`."""
    from_end = lead.split_dim - lead.ndim
    has = tensor.ndim >= -from_end and tensor.shape[from_end] == lead.sequence.length
    dim = tensor.ndim + from_end if has else None
    return part_of(tensor, dim, lead.sequence, what, lead.group)


def turned(x: SequenceTensor, avoid: Sequence[int], what: str) -> SequenceTensor | None:
    """`x`, split along another dimension than its own and those in `avoid`; None if no other is long enough."""
    size = x.group.size
    dims = [d for d in (*range(1, x.ndim), 0) if d not in avoid and d != x.split_dim and x.shape[d] >= size]
    if not dims:
        return None
    dim = min(dims, key=lambda d: x.shape[d] % size > 0)
    layout = elsewhere(x.shape[dim], size)
    return SequenceTensor(part_of(x, dim, layout, what, x.group), dim, layout, x.group)


def returned(tensor: Any, x: SequenceTensor, what: str) -> Any:
    """A result of a turned `x` in the layout of `x`, if it has that dimension."""
    if isinstance(tensor, SequenceTensor) and tensor.ndim == x.ndim and tensor.shape[x.split_dim] == x.sequence.length:
        return x.like(part_of(tensor, x.split_dim, x.sequence, what, x.group))
    return tensor


def sequence_or_whole(local: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup) -> torch.Tensor:
    """A sequence tensor, or a plain one if the sequence is too short to be worth it."""
    if layout.length < 2 * group.size:
        return fetch(local, dim, layout, None, "short sequence", group)
    return SequenceTensor(local, dim, layout, group)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with ``function(tensor)`` in place of each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in (tuple, list) and not any(isinstance(leaf, tuple | list | dict) for leaf in tree):
        mapped = [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree]
        return tuple(mapped) if type(tree) is tuple else mapped
    if type(tree) is dict and not tree:
        return tree
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def on_meta(tree: Any) -> Any:
    """`tree` with tensors of the same shapes and types that have no values."""
    return map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tree)


def sequence_tensors(tree: Any) -> list[SequenceTensor]:
    """The sequence tensors of a nest."""
    return [leaf for leaf in tree_tensors(tree) if isinstance(leaf, SequenceTensor)]
