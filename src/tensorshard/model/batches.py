"""Batches of any structure: cutting them into micro-batches, counting their samples, calling a model with them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.torch_private.pytree import tree_flatten, tree_map, tree_unflatten


def batch_size(inputs: Any) -> int:
    """Number of samples: the first dimension of the tensors in `inputs`.

    Raises:
        ValueError: there is no tensor, or they disagree.
        TypeError: `inputs` is no tensor, tuple or dict.
    """
    if not isinstance(inputs, torch.Tensor | tuple | list | dict):
        raise TypeError(f"inputs are {kind_of(inputs)}; they must be a tensor, or a tuple or dict of tensors")
    leaves = tree_flatten(inputs)[0]
    sizes = {t.size(0) for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0}
    if len(sizes) != 1:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)}))
        given = f"first dimensions {sorted(sizes)}" if sizes else f"no tensors{f' (they are {kinds})' if kinds else ''}"
        raise ValueError(f"inputs have {given}; every tensor must have the samples as its first dimension")
    return sizes.pop()


def split_batch(inputs: Any, targets: Any, parts: int) -> list[tuple[Any, Any]]:
    """Cuts `inputs` and `targets` along their first dimension into `parts` micro-batches of equal size.

    Every part gets the tensors without dimensions, and the values that are no tensors.

    Raises:
        ValueError: the number of samples is not divisible by `parts`.
    """
    size = batch_size(inputs)
    if parts == 1:
        return [(inputs, targets)]
    if size % parts:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"a batch of {size} samples on this rank does not split into micro_batches={parts} equal parts; "
            f"with {size} samples micro_batches can be {', '.join(map(str, fitting))}. An epoch's last "
            f"batch: take engine.loader(dataset, batch_size), which deals it exactly, or DataLoader(drop_last=True)"
        )
    return list(zip(_split(inputs, size, parts), _split(targets, size, parts), strict=True))


def split_unevenly(inputs: Any, targets: Any, parts: int) -> list[tuple[Any, Any]]:
    """Cuts a batch into at most `parts` micro-batches whose sizes differ by one at most."""
    return split_into(inputs, targets, max(1, min(parts, batch_size(inputs))))


def split_into(inputs: Any, targets: Any, parts: int) -> list[tuple[Any, Any]]:
    """Cuts a batch into exactly `parts` micro-batches whose sizes differ by one at most; the last ones may be empty."""
    if parts == 1:
        return [(inputs, targets)]
    size = batch_size(inputs)
    return list(zip(_split(inputs, size, parts), _split(targets, size, parts), strict=True))


def _split(tree: Any, size: int, parts: int) -> list[Any]:
    leaves, structure = tree_flatten(tree)
    columns = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            columns.append([leaf] * parts)
        elif leaf.size(0) != size:
            raise ValueError(
                f"a target tensor of shape {tuple(leaf.shape)} cannot be cut into micro-batches beside inputs of "
                f"{size} samples; its first dimension must be {size}"
            )
        else:
            columns.append(list(leaf.tensor_split(parts)))
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(parts)]


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
