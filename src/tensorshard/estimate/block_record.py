"""What a block's call does to memory: its storages coming and going, in forward and in backward."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from tensorshard.estimate.block_structure import Read
from tensorshard.estimate.operation_ledger import Counts
from tensorshard.estimate.storage_ledger import Allocation
from tensorshard.torch_private.pytree import TreeSpec
from tensorshard.torch_private.tensors import storage_address


class Owner(Enum):
    """Whose a storage is."""

    CALL = auto()
    """The call made it."""
    INPUT = auto()
    """The call was given it."""
    GRADIENT = auto()
    """The call's backward was given it."""


class Place(NamedTuple):
    """A tensor on one of a call's storages.

    Args:
        number: of the storage among its owner's.
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
        nbytes: by how much; 0 for one that it was given.
    """

    owner: Owner
    number: int
    nbytes: int
    phase: str


@dataclass(frozen=True)
class Birth:
    """A parameter's gradient is there.

    Args:
        parameter: its number among the block's.
        at: how many steps of backward are before it.
    """

    parameter: int
    at: int
    gradient: Place


@dataclass(frozen=True)
class Given:
    """A tensor that a call was given.

    Args:
        storage: its number among those of the call's arguments.
        nbytes: of that.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    nbytes: int


Pattern = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]
"""The size, stride and type of the gradient of each differentiable output; None for one that has none."""


@dataclass
class Backward:
    """A call's backward.

    Args:
        steps: in order, of which the first `length` are before the inputs' gradients are handed on.
        births: of the parameters' gradients, in order.
        gradients: of the inputs that require one.
    """

    steps: list[Step]
    length: int
    births: list[Birth]
    gradients: list[Place | None]
    counts: Counts


@dataclass
class Record:
    """What calls of a block with the same arguments do.

    Args:
        key: what was the same: the arguments' shapes, and the modes that it was called in.
        reads: the plain attributes that were read, and what they held.
        allocations: how the call's storages came to be.
        forward_steps: what storages do in forward; the first `length` steps are before the outputs are returned.
        outputs: tensors, each with its place, and other values, in the order of `spec`.
        handed_on: the call's storages that others get, with their sizes in bytes.
        backwards: by the gradients that it starts from.
        usual: those that are expected.
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
    """What `tensors` are, and which of them share a storage."""
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
