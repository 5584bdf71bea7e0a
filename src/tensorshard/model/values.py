"""Outputs of modules, taken apart into tensors and a structure; and the layout of tensors that do not exist yet."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorshard.model.tensors import copy_record, is_record, set_fields
from tensorshard.torch_private.pytree import TreeSpec, spec_as_tuples, spec_from_tuples, tree_flatten, tree_unflatten

_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, torch.layout, enum.Enum)


@dataclass(frozen=True)
class Layout:
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
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """The layout of `tensor`; contiguous if its own has gaps or overlaps."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not _is_dense(shape, stride):
            stride = tuple(torch.empty(shape, device="meta").stride())
        return cls(shape, stride, tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this layout, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this shape and type."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def on_the_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous view of `tensor`, in the order of its memory. `tensor` has this layout."""
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim))
        return tensor.permute(order)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in this layout: the same tensor, or a copy."""
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
        """The classes of the objects in it that cannot be taken apart."""
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
    """The tensors in `value`, in the order of :func:`tensorshard.model.tensors.tensor_leaves`, and the rest of it."""
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
