"""The log of the operations that make initial values, and computing one tensor by those that it needs."""

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorshard.torch_private.pytree import TreeSpec, tree_leaves, tree_unflatten
from tensorshard.torch_private.tensors import storage_address

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


def replay(log: Log, target: TensorRef, *, seed: int) -> torch.Tensor:
    """The value of a recorded tensor at the end of the recording.

    Runs only the operations it needs, and frees each storage after its last use. A random operation draws
    from torch's CPU generator, seeded from `seed` and the operation's index among the random ones; the
    generator is left as it was.

    Args:
        log: The recorded operations.
        target: The tensor to compute.
        seed: The seed of the whole model.

    Returns:
        A CPU tensor with its own memory.
    """
    operations = log.needed_for(target.storage)
    last_use = {
        storage: index for index, operation in enumerate(operations) for storage in operation.reads | operation.writes
    }
    storages: dict[int, torch.UntypedStorage] = {}
    with _global_state_kept(), torch.no_grad():
        for index, operation in enumerate(operations):
            _run(operation, storages, log, seed)
            for storage in operation.reads | operation.writes:
                if last_use[storage] == index and storage != target.storage:
                    storages.pop(storage, None)
    return _rebuild(target, storages, log)


def _run(operation: Operation, storages: dict[int, torch.UntypedStorage], log: Log, seed: int) -> None:
    leaves = [
        _rebuild(leaf, storages, log) if isinstance(leaf, TensorRef) else leaf for leaf in operation.arguments.leaves
    ]
    args, kwargs = tree_unflatten(leaves, operation.arguments.spec)
    if operation.draw is not None:
        torch.default_generator.manual_seed(draw_seed(seed, operation.draw))
    if torch.get_default_dtype() != operation.default_dtype:
        torch.set_default_dtype(operation.default_dtype)
    outputs = tree_leaves(operation.func(*args, **kwargs))
    for position, ref in operation.outputs:
        output = outputs[position]
        if operation.makes_room:
            output.zero_()  # so that every process and every replay sees the same
        storages[ref.storage] = _laid_out(output, ref, storages).untyped_storage()


def _rebuild(ref: TensorRef, storages: dict[int, torch.UntypedStorage], log: Log) -> torch.Tensor:
    """The tensor at `ref`. If its storage does not exist yet, it is allocated: it is about to be filled whole."""
    storage = storages.get(ref.storage)
    if storage is None:
        storage = storages[ref.storage] = torch.UntypedStorage(log.sizes[ref.storage])
    elif storage.nbytes() < log.sizes[ref.storage]:
        storage.resize_(log.sizes[ref.storage])
    return torch.empty(0, dtype=ref.dtype, device="cpu").set_(storage, ref.offset, ref.size, ref.stride)


def _laid_out(output: torch.Tensor, ref: TensorRef, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """`output` as it was recorded: with the strides that later operations rely on, and in its own memory.

    Fake tensors nearly always get both right. One exception is `native_dropout` in evaluation, which returns its input.
    """
    borrowed = storage_address(output.untyped_storage()) in map(storage_address, storages.values())
    if not borrowed and output.stride() == ref.stride and output.storage_offset() == ref.offset:
        return output
    blank = torch.UntypedStorage(0)
    made = torch.empty(0, dtype=ref.dtype, device="cpu").set_(blank, ref.offset, ref.size, ref.stride)
    return made.copy_(output)


def draw_seed(seed: int, draw: int) -> int:
    """The seed of a model's random operation number `draw`.

    32 bits, since torch's CPU generator uses no more. The odd multiplier makes the map from `draw` one to one
    (Knuth's multiplicative hashing), so that no two tensors of a model start from the same numbers.
    """
    base = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little")
    return (base + draw * 0x9E3779B1) % 2**32


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """torch's CPU generator and default dtype, restored on leaving."""
    generator, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.default_generator.set_state(generator)
        torch.set_default_dtype(dtype)
