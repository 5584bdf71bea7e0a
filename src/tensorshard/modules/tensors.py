"""Tensors in nested structures, and which of them share memory."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tensorshard.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten
from tensorshard.torch_private.tensors import storage_address


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is the same for a tensor and its views."""
    return storage_address(tensor.untyped_storage())


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order.

    Containers are those of pytree (tuples, lists, dicts, what libraries register, such as the outputs of transformers)
    and dataclasses.
    """
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass_instance(leaf):
            found += tensor_leaves([getattr(leaf, name) for name in set_fields(leaf)])
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with ``function(tensor)`` for each of its tensors, in the order of :func:`tensor_leaves`."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_mapped(function, leaf) for leaf in leaves], spec)


def map_tensors_once(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """As :func:`map_tensors`, but a tensor that occurs several times is mapped once, so it stays one tensor."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return map_tensors(once, tree)


def is_dataclass_instance(leaf: Any) -> bool:
    """Whether `leaf` is a dataclass's instance, not the class."""
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def set_fields(instance: Any) -> tuple[str, ...]:
    """Names of the fields of a dataclass's `instance` that have a value."""
    return tuple(field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name))


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if is_dataclass_instance(leaf):
        made = copy.copy(leaf)
        for name in set_fields(leaf):
            object.__setattr__(made, name, map_tensors(function, getattr(leaf, name)))
        return made
    return leaf
