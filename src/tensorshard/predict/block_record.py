"""A record of what a block's call does to memory: which storages it makes and frees, in forward and in backward."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from tensorshard.predict.block_structure import Read
from tensorshard.predict.operation_ledger import Counts
from tensorshard.predict.storage_ledger import Allocation
from tensorshard.torch_private.pytree import TreeSpec
from tensorshard.torch_private.tensors import storage_address


class Owner(Enum):
    """Where a storage comes from."""

    CALL = auto()
    """The call made it."""
    INPUT = auto()
    """The call was given it."""
    GRADIENT = auto()
    """The call's backward was given it."""


class Place(NamedTuple):
    """A tensor on one of a call's storages.

    Args:
        number: the storage's number among those of its owner.
    """

    owner: Owner
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


class Step(NamedTuple):
    """A storage of the call grows or shrinks; or the call lets go of one that it was given.

    Args:
        nbytes: by how much; 0 if the call lets go of a storage that it was given.
    """

    owner: Owner
    number: int
    nbytes: int
    phase: str


@dataclass(frozen=True)
class Birth:
    """The moment in backward when a parameter's gradient is computed.

    Args:
        parameter: its number among the block's.
        at: how many steps of backward come before it.
    """

    parameter: int
    at: int
    gradient: Place


@dataclass(frozen=True)
class Given:
    """A tensor that a call was given.

    Args:
        storage: the number of its storage among those of the call's arguments.
        nbytes: the size of that storage.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    nbytes: int


Pattern = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]
"""The size, stride and type of the gradient of each differentiable output; None for an output without a gradient."""


@dataclass
class Backward:
    """A call's backward.

    Args:
        steps: in order; the first `length` come before the inputs' gradients are returned.
        births: one for each parameter's gradient, in order.
        gradients: of the inputs that require a gradient.
        allocations: how the storages of the whole call came to be, if this is its backward.
        handed_on: storages that the call makes and returns, as outputs or gradients, with their sizes in bytes.
    """

    steps: list[Step]
    length: int
    births: list[Birth]
    gradients: list[Place | None]
    counts: Counts
    allocations: list[Allocation] = field(default_factory=list)
    handed_on: dict[int, tuple[Place, int]] = field(default_factory=dict)


@dataclass
class Record:
    """What every call of a block with the same kind of arguments does to memory.

    Args:
        key: what these calls have in common: the arguments' shapes, and the modes that the block is called in.
        reads: the plain attributes that were read, and what they held.
        allocations: how the call's storages came to be.
        forward_steps: the steps of forward; the first `length` come before the outputs are returned.
        outputs: tensors, each with its place, and other values, in the order of `spec`.
        handed_on: as of the usual backward.
        backwards: what backward does, by the gradients that it starts from.
        usual: the gradients that backward is expected to start from.
    """

    key: Hashable
    reads: dict[Read, Any]
    allocations: list[Allocation]
    forward_steps: list[Step]
    length: int
    outputs: list[Any]
    spec: TreeSpec
    counts: Counts
    handed_on: dict[int, tuple[Place, int]]
    backwards: dict[Pattern, Backward] = field(default_factory=dict)
    usual: Pattern = ()


def given(tensors: list[torch.Tensor]) -> list[Given]:
    """A description of each of `tensors`, and of which of them share a storage."""
    storages: dict[int, int] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        number = storages.setdefault(storage_address(storage), len(storages))
        found.append(
            Given(
                tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
                tensor.requires_grad, number, storage.nbytes(),
            )
        )  # fmt: skip
    return found


def on_storage(size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, nbytes: int) -> Any:
    """A new tensor of that layout, on a storage of `nbytes`."""
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    if offset == 0 and tensor.untyped_storage().nbytes() == nbytes:
        return tensor
    del tensor
    return torch.empty(nbytes // dtype.itemsize, dtype=dtype).as_strided(size, stride, offset)
