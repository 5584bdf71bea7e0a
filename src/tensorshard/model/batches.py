"""Batches of any structure: cutting them into micro-batches, counting their samples, calling a model with them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.torch_private.pytree import tree_flatten, tree_map, tree_unflatten


def batch_size(inputs: Any, targets: Any = None) -> int:
    """Number of samples: the first dimension of the tensors in `inputs`, or the entries of its lists of samples.

    Args:
        targets: of the same samples, if there are some.

    Raises:
        ValueError: there is no tensor, or they disagree.
        TypeError: `inputs` is no tensor, tuple or dict.
    """
    if not isinstance(inputs, torch.Tensor | tuple | list | dict):
        raise TypeError(f"inputs are {kind_of(inputs)}; they must be a tensor, or a tuple or dict of tensors")
    listed = _listed_samples(inputs, targets).samples
    if listed is not None:
        return listed
    leaves = tree_flatten(inputs)[0]
    sizes = {t.size(0) for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0}
    if len(sizes) != 1:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)}))
        given = f"first dimensions {sorted(sizes)}" if sizes else f"no tensors{f' (they are {kinds})' if kinds else ''}"
        raise ValueError(f"inputs have {given}; every tensor must have the samples as its first dimension")
    return sizes.pop()


class _Listed(NamedTuple):
    """What lists of tensors in a batch are.

    Args:
        samples: how many samples, if lists have an entry for each; None if tensors have the samples as first dimension.
        unclear: a list that may be either.
    """

    samples: int | None = None
    unclear: Sequence[torch.Tensor] | None = None


def _listed_samples(inputs: Any, targets: Any) -> _Listed:
    """Whether lists in a batch have an entry for each sample, as clouds of points or images of all sizes have.

    That is so if the other tensors have as many rows, or if the entries' first dimensions differ. A list of tensors
    that are alike, and nothing else, may be columns or samples. A tuple is of columns if nothing else is known.
    """
    lists: list[Sequence[torch.Tensor]] = []
    others: set[int] = set()
    roots = (inputs.values() if isinstance(inputs, dict) else inputs) if targets is not None else [inputs]
    if isinstance(roots, torch.Tensor):
        roots = [roots]
    waiting: list[Any] = [*roots, targets]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            others.update(node.shape[:1])
        elif _are_alike(node):
            lists.append(node)
        elif isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list | tuple):
            waiting += node
    lengths = {len(each) for each in lists}
    if len(lengths) != 1:
        return _Listed()
    (entries,) = lengths
    rows = {tensor.size(0) for each in lists for tensor in each}
    if len(rows) > 1:
        return _Listed(entries if others <= {entries} else None)
    if others == {entries} != rows:
        return _Listed(entries)
    if others and others == rows != {entries}:
        return _Listed()
    return _Listed(unclear=next((each for each in lists if type(each) is list), None))


def _are_alike(node: Any) -> bool:
    """Whether it is a list or tuple of tensors that have one type and number of dimensions."""
    if type(node) not in (list, tuple) or not node or not all(isinstance(e, torch.Tensor) and e.dim() for e in node):
        return False
    return len({(e.dtype, e.dim()) for e in node}) == 1


def listed_samples(batch: Any) -> int | None:
    """How many samples a batch has whose lists have an entry for each; None if its tensors have a row for each."""
    return _listed_samples(batch, None).samples


def unclear_list(batch: Any) -> int | None:
    """The length of a list in `batch` of which it is not known whether its entries are samples; None for none."""
    unclear = _listed_samples(batch, None).unclear
    return None if unclear is None else len(unclear)


def split_batch(inputs: Any, targets: Any, parts: int) -> list[tuple[Any, Any]]:
    """Cuts `inputs` and `targets` along their first dimension into `parts` micro-batches of equal size.

    Every part gets the tensors without dimensions, and the values that are no tensors.

    Raises:
        ValueError: the number of samples is not divisible by `parts`.
    """
    size = batch_size(inputs, targets)
    if parts == 1:
        return [(inputs, targets)]
    if size % parts:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"a batch of {size} samples on this rank does not split into micro_batches={parts} equal parts; "
            f"with {size} samples micro_batches can be {', '.join(map(str, fitting))}. An epoch's last "
            f"batch: take engine.loader(dataset, batch_size), which deals it exactly, or DataLoader(drop_last=True)"
        )
    return _cut(inputs, targets, size, parts)


def split_unevenly(inputs: Any, targets: Any, parts: int) -> list[tuple[Any, Any]]:
    """Cuts a batch into at most `parts` micro-batches whose sizes differ by one at most."""
    return split_into(inputs, targets, max(1, min(parts, batch_size(inputs, targets))))


def split_into(inputs: Any, targets: Any, parts: int, *, known: bool = False) -> list[tuple[Any, Any]]:
    """Cuts a batch into exactly `parts` micro-batches whose sizes differ by one at most; the last ones may be empty.

    Args:
        known: whether the rows of its tensors are known to be the samples.
    """
    if parts == 1:
        return [(inputs, targets)]
    return _cut(inputs, targets, batch_size(inputs, targets), parts, known)


def _cut(inputs: Any, targets: Any, size: int, parts: int, known: bool = False) -> list[tuple[Any, Any]]:
    listed = _listed_samples(inputs, targets)
    if listed.unclear is not None and not known:
        entries, rows = len(listed.unclear), listed.unclear[0].size(0)
        raise ValueError(
            f"a batch with a list of {entries} tensors of {rows} rows each was to be cut into {parts} micro-batches, "
            f"and it may be {entries} samples or {rows}: give a tuple of tensors, whose rows are the samples; or a "
            f"tensor with a row for each sample beside the list; or set micro_batches=1"
        )
    lists = listed.samples is not None
    return list(zip(_split(inputs, size, parts, lists), _split(targets, size, parts, lists), strict=True))


def _split(tree: Any, size: int, parts: int, lists: bool) -> list[Any]:
    def has_entries(node: Any) -> bool:
        if type(node) not in (list, tuple) or len(node) != size:
            return False
        return _are_alike(node) if lists and isinstance(node[0], torch.Tensor) else _are_values(node)

    leaves, structure = tree_flatten(tree, is_leaf=has_entries)
    columns = []
    for leaf in leaves:
        if isinstance(leaf, list | tuple):
            columns.append(_slices(leaf, parts))
        elif not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            columns.append([leaf] * parts)
        elif leaf.size(0) != size:
            raise ValueError(
                f"a target tensor of shape {tuple(leaf.shape)} cannot be cut into micro-batches beside inputs of "
                f"{size} samples; its first dimension must be {size}"
            )
        else:
            columns.append(_jagged(leaf, parts) if leaf.layout == torch.jagged else list(leaf.tensor_split(parts)))
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(parts)]


def _are_values(node: Sequence[Any]) -> bool:
    """Whether it is a list of names, numbers or the like, one for each sample; or a tuple of names."""
    kinds = (str, bytes) if isinstance(node, tuple) else (str, bytes, bool, int, float)
    return all(isinstance(entry, kinds) for entry in node)


def _slices(entries: Sequence[Any], parts: int) -> list[Any]:
    """`parts` pieces, whose sizes differ by one at most, as ``torch.tensor_split`` cuts."""
    each, longer = divmod(len(entries), parts)
    begins = [number * each + min(number, longer) for number in range(parts + 1)]
    return [entries[first:last] for first, last in pairwise(begins)]


def _jagged(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """A nested tensor, cut between its samples."""
    pieces = _slices(tensor.unbind(), parts)
    return [
        torch.nested.as_nested_tensor(list(piece), layout=torch.jagged) if piece else tensor[:0] for piece in pieces
    ]


def samples_taken(tree: Any, size: int, taken: Sequence[int], dim: int = 0) -> Any:
    """A batch with the samples that `taken` names, in its order.

    Args:
        tree: a batch of `size` samples: tensors with so many rows, and lists with so many entries. The rest is kept.
        dim: the dimension of the samples. Tensors that have no such dimension have them in the first.
    """

    def is_list(node: Any) -> bool:
        entries = type(node) in (list, tuple) and len(node) == size
        return entries and (listed if isinstance(node[0], torch.Tensor) else _are_values(node))

    def part(leaf: Any) -> Any:
        if isinstance(leaf, list | tuple):
            return type(leaf)(leaf[index] for index in taken)
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        at = dim if leaf.dim() > dim and leaf.size(dim) == size else 0
        if leaf.size(at) != size:
            return leaf
        if leaf.layout == torch.jagged:
            pieces = leaf.unbind()
            return torch.nested.as_nested_tensor([pieces[index] for index in taken], layout=torch.jagged)
        return leaf.index_select(at, torch.tensor(taken, device=leaf.device))

    listed = listed_samples(tree) == size
    leaves, structure = tree_flatten(tree, is_leaf=is_list)
    return tree_unflatten([part(leaf) for leaf in leaves], structure)


def samples_joined(one: Any, other: Any) -> Any:
    """A batch of two samples, made of two of one sample each; None if they differ in more than their values."""
    leaves, structure = tree_flatten(one)
    others, other_structure = tree_flatten(other)
    if structure != other_structure:
        return None
    joined = []
    for first, second in zip(leaves, others, strict=True):
        if not isinstance(first, torch.Tensor) or first.dim() == 0 or first.size(0) != 1:
            joined.append(first)
        elif first.layout != torch.strided or first.shape != second.shape:
            return None
        else:
            joined.append(torch.cat([first, second.to(first)]))
    return tree_unflatten(joined, structure)


def without_samples(tree: Any) -> Any:
    """`tree`, made of one sample, with no sample in those tensors whose first dimension is that of the samples."""
    return tree_map(
        lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == 1 else leaf, tree
    )


def to_device(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`; copies from pinned memory do not block."""
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x, tree)


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's call: a tensor is one; a tuple or list, several; a dict, keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Calls `model` with `inputs` as its arguments, see :func:`call_arguments`."""
    args, kwargs = call_arguments(inputs)
    return model(*args, **kwargs)
