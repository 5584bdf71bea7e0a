"""The log of the operations that make initial values, and which of them one storage needs."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorshard.torch_private.pytree import TreeSpec

aten = torch.ops.aten

EMPTY_FACTORIES = frozenset(
    {
        aten.empty,
        aten.empty_like,
        aten.empty_permuted,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)


@dataclass(frozen=True)
class TensorRef:
    """A tensor in the log: the index of its storage, and its layout in it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flattened, with a `TensorRef` in place of each recorded tensor."""

    leaves: list[Any]
    spec: TreeSpec  # of (args, kwargs)


@dataclass(frozen=True)
class Operation:
    """One recorded call.

    Attributes:
        func: What was called.
        arguments: What it was given.
        outputs: The tensors it made: for each, its position among the flattened outputs, and the tensor's reference.
        reads: The storages whose earlier content it needs.
        writes: The storages it changes.
        defines: Those of `writes` that it fills whole, whatever was there before.
        draw: For a random operation, its index among the random operations.
        default_dtype: torch's default dtype at the time of the call. Some results depend on it.
    """

    func: Callable[..., Any]
    arguments: Arguments
    outputs: list[tuple[int, TensorRef]]
    reads: frozenset[int]
    writes: frozenset[int]
    defines: frozenset[int]
    draw: int | None
    default_dtype: torch.dtype

    @property
    def makes_room(self) -> bool:
        """Whether it only allocates memory, and sets no values."""
        return getattr(self.func, "overloadpacket", None) in EMPTY_FACTORIES


@dataclass
class Log:
    """Operations in the order of their calls.

    Attributes:
        operations: The calls.
        sizes: For each storage, its size in bytes (the largest it had).
    """

    operations: list[Operation] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    _writers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def append(self, operation: Operation) -> None:
        """Add one call."""
        for storage in operation.writes:
            self._writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def is_written(self, storage: int) -> bool:
        """Whether any operation put values into `storage`."""
        return not all(self.operations[index].makes_room for index in self._writers[storage])

    def needed_for(self, storage: int) -> list[Operation]:
        """The operations that have an effect on the final content of `storage`, in the order of their calls.

        It walks from the last write back to the one that fills the storage whole, and from there to what those
        operations read. So a default initialisation that the model overwrites is never run.
        """
        needed: set[int] = set()
        visited: set[tuple[int, int]] = set()
        todo = [(storage, len(self.operations))]
        while todo:
            current, before = todo.pop()
            writers = self._writers[current]
            for index in reversed(writers[: bisect_left(writers, before)]):
                if (current, index) in visited:
                    break
                visited.add((current, index))
                operation = self.operations[index]
                if index not in needed:
                    needed.add(index)
                    todo.extend((read, index) for read in operation.reads)
                if current in operation.defines:
                    break
        return [self.operations[index] for index in sorted(needed)]
