"""Tensors in nested structures, and which of them share memory."""

import copy
import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Collection, Mapping
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tensorshard.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten
from tensorshard.torch_private.tensors import storage_address


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is the same for a tensor and its views."""
    return storage_address(tensor.untyped_storage())


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order.

    Containers are those of pytree (tuples, lists, dicts, what libraries register, such as the outputs of transformers),
    dataclasses, and the records of the standard library (``SimpleNamespace``, ``UserDict``, ``UserList``).
    """
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_record(leaf):
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


def tensors_within(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, also those in objects of any class: their attributes, slots, items and closures.

    Modules and classes are not entered: their tensors are not those of a result.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, nn.Module | type | ModuleType | str | bytes | int | float):
            continue
        seen.add(id(current))
        if isinstance(current, torch.Tensor):
            found.append(current)
            continue
        waiting += (leaf for leaf in tree_leaves(current) if leaf is not current)
        if isinstance(current, Mapping):
            waiting += current.values()
        elif isinstance(current, Collection):
            waiting += current
        if isinstance(current, FunctionType):
            waiting += (cell.cell_contents for cell in current.__closure__ or () if _is_filled(cell))
        elif isinstance(current, MethodType):
            waiting.append(current.__self__)
        else:
            waiting += getattr(current, "__dict__", {}).values()
            slots = (name for kind in type(current).__mro__ for name in _slots(kind))
            waiting += (getattr(current, name) for name in slots if hasattr(current, name))
    return found


def is_record(leaf: Any) -> bool:
    """Whether `leaf` is nothing more than its fields: a dataclass's instance, or a record of the standard library."""
    if isinstance(leaf, type):
        return False
    return dataclasses.is_dataclass(leaf) or isinstance(leaf, SimpleNamespace | UserDict | UserList)


def set_fields(instance: Any) -> tuple[str, ...]:
    """Names of the fields of a record's `instance` that have a value."""
    if not dataclasses.is_dataclass(instance):
        return tuple(vars(instance))
    return tuple(field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name))


def copy_record(record: Any) -> Any:
    """A shallow copy of a record, whatever its fields hold now."""
    if dataclasses.is_dataclass(record):
        return copy.copy(record)
    kind: Any = type(record)
    made = kind.__new__(kind)
    vars(made).update(vars(record))
    return made


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if is_record(leaf):
        made = copy_record(leaf)
        for name in set_fields(leaf):
            object.__setattr__(made, name, map_tensors(function, getattr(leaf, name)))
        return made
    return leaf
