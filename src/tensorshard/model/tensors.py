"""Tensors in nested structures: finding and mapping them, taking them out, specs without values, memory."""

import copy
import dataclasses
import enum
from collections import UserDict, UserList
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tensorshard.model.references import ATOMIC, contents_of, slots_of
from tensorshard.torch_private.pytree import (
    TreeSpec,
    spec_as_tuples,
    spec_from_tuples,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from tensorshard.torch_private.tensors import storage_address

_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, torch.layout, enum.Enum)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is the same for a tensor and its views."""
    if tensor.layout not in (torch.strided, torch.jagged):
        return -id(tensor)  # a sparse one has no memory of its own
    return storage_address(tensor.untyped_storage())


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order.

    Containers are those of pytree (tuples, lists, dicts, what libraries register, such as the outputs of transformers),
    dataclasses, and the records of the standard library (``SimpleNamespace``, ``UserDict``, ``UserList``).
    """
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif is_record(leaf):
            tensors += tensor_leaves([getattr(leaf, name) for name in set_fields(leaf)])
    return tensors


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with ``function(tensor)`` for each of its tensors, in the order of :func:`tensor_leaves`."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_mapped(function, leaf) for leaf in leaves], spec)


def another_takes_precedence(types: Sequence[type]) -> bool:
    """Whether a class among the `types` of a function's arguments wants to do the function, as it says by an attribute
    ``takes_precedence``."""
    return any(getattr(each, "takes_precedence", False) for each in types)


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
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, (nn.Module, *ATOMIC)):
            continue
        seen.add(id(current))
        if isinstance(current, torch.Tensor):
            tensors.append(current)
            continue
        waiting += (leaf for leaf in tree_leaves(current) if leaf is not current)
        if isinstance(current, Mapping):
            waiting += current.values()
        elif isinstance(current, Collection):
            waiting += current
        if isinstance(current, FunctionType):
            waiting += (inner for cell in current.__closure__ or () for inner in contents_of(cell))
        elif isinstance(current, MethodType):
            waiting.append(current.__self__)
        else:
            waiting += getattr(current, "__dict__", {}).values()
            waiting += (getattr(current, name) for _, name in slots_of(current) if hasattr(current, name))
    return tensors


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


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if is_record(leaf):
        made = copy_record(leaf)
        for name in set_fields(leaf):
            object.__setattr__(made, name, map_tensors(function, getattr(leaf, name)))
        return made
    return leaf


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values.

    Args:
        shape: its size in each dimension.
        stride: in elements; that of a dense tensor.
        dtype: its type.
        requires_grad: whether a gradient is sent back for it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of `tensor`; contiguous if its own memory has gaps or overlaps."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not _is_dense(shape, stride):
            stride = tuple(torch.empty(shape, device="meta").stride())
        return cls(shape, stride, tensor.dtype, tensor.requires_grad)

    def with_length(self, dim: int, length: int) -> "TensorSpec":
        """The spec of a contiguous tensor with `length` elements along `dim`."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return dataclasses.replace(self, shape=shape, stride=tuple(torch.empty(shape, device="meta").stride()))

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this spec, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this shape and type."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous view of `tensor`, in the order of its memory. `tensor` has this spec."""
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim))
        return tensor.permute(order)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with these strides: the same tensor, or a copy."""
        if tuple(tensor.stride()) == self.stride:
            return tensor
        return self.empty(tensor.device).copy_(tensor)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for extent, step in sorted(
        ((e, s) for e, s in zip(shape, stride, strict=True) if e != 1), key=lambda pair: (pair[1], pair[0])
    ):
        if step != expected:
            return False
        expected *= extent
    return True


class Opaque:
    """Stands for an object in an output that is neither a tensor nor plain data, such as a cache."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


@dataclass(frozen=True)
class Structure:
    """How an object is built from tensors and plain values: the inverse of :func:`take_apart`.

    Args:
        spec: the nesting.
        leaves: plain values, or the index of a tensor as :class:`_Tensor`, or a record as :class:`_Fields`.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (spec_as_tuples(self.spec), self.leaves)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The object, with `tensors` in place of its own."""
        return tree_unflatten([_built(leaf, tensors) for leaf in self.leaves], self.spec)

    def opaque(self) -> list[str]:
        """The classes of the objects in it that are no containers of tensors."""
        kinds: list[str] = []
        for leaf in self.leaves:
            if isinstance(leaf, Opaque):
                kinds.append(leaf.kind)
            elif isinstance(leaf, _Fields):
                kinds += leaf.structure.opaque()
        return kinds


def _received(spec: Any, leaves: tuple[Any, ...]) -> Structure:
    return Structure(spec_from_tuples(spec), leaves)


@dataclass(frozen=True)
class _Tensor:
    index: int


@dataclass(frozen=True)
class _Fields:
    """A record, such as a dataclass, that pytree does not know: an instance without its fields, and the fields."""

    shell: Any
    names: tuple[str, ...]
    structure: Structure


def take_apart(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """The tensors in `value`, in the order of :func:`tensor_leaves`, and the rest of it."""
    tensors: list[torch.Tensor] = []
    return tensors, _structure(value, tensors)


def _structure(value: Any, tensors: list[torch.Tensor]) -> Structure:
    leaves, spec = tree_flatten(value)
    return Structure(spec, tuple(_leaf(leaf, tensors) for leaf in leaves))


def _leaf(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf)
        return _Tensor(len(tensors) - 1)
    if leaf is None or isinstance(leaf, _PLAIN):
        return leaf
    if is_record(leaf):
        names = set_fields(leaf)
        inner = _structure([getattr(leaf, name) for name in names], tensors)
        shell = copy_record(leaf)
        for name in names:
            object.__setattr__(shell, name, None)
        return _Fields(shell, names, inner)
    return Opaque(type(leaf).__name__)


def _built(leaf: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(leaf, _Tensor):
        return tensors[leaf.index]
    if isinstance(leaf, Opaque):
        return None
    if isinstance(leaf, _Fields):
        made = copy_record(leaf.shell)
        for name, value in zip(leaf.names, leaf.structure.build(tensors), strict=True):
            object.__setattr__(made, name, value)
        return made
    return leaf
