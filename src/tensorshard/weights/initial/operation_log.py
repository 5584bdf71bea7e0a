"""The log of the operations that make initial values, and computing one tensor by those that it needs."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorshard.comm.world import world
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


# Random operations that take as many numbers from the generator whatever is in the tensors that they are given.
_ANY_CONTENT = frozenset({aten.native_dropout, aten.rand_like, aten.randint_like, aten.randn_like})

_STATES_KEPT = 256


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
class LoggedOperation:
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
        draws: The random operations, by their indices in `operations`.
    """

    operations: list[LoggedOperation] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    _writers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def append(self, operation: LoggedOperation) -> None:
        """Add one call."""
        for storage in operation.writes:
            self._writers[storage].append(len(self.operations))
        if operation.draw is not None:
            self.draws.append(len(self.operations))
        self.operations.append(operation)

    def is_written(self, storage: int) -> bool:
        """Whether any operation put values into `storage`."""
        return not all(self.operations[index].makes_room for index in self._writers[storage])

    def needed_for(self, storages: Iterable[int], before: int | None = None) -> list[LoggedOperation]:
        """The operations that have an effect on the content of `storages`, in the order of their calls.

        Args:
            before: The index of the operation before which that content is wanted; None for the final content.

        It walks from the last write back to the one that fills the storage whole, and from there to what those
        operations read. So a default initialisation that the model overwrites is never run.
        """
        needed: set[int] = set()
        visited: set[tuple[int, int]] = set()
        todo = [(storage, len(self.operations) if before is None else before) for storage in storages]
        while todo:
            current, end = todo.pop()
            writers = self._writers[current]
            for index in reversed(writers[: bisect_left(writers, end)]):
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


class RandomStates:
    """The state of torch's CPU generator before each random operation of a log, as ``torch.manual_seed(seed)`` and the
    whole constructor would have it.

    Which numbers an operation draws depends on how many were drawn before. So those that come before it are run, too,
    each on memory that is freed at once. That takes the time of the draws, 3 ns a number, once: tensors are asked for
    in about the order in which they were made, and some states in between are kept.

    With ``in_order=False`` each operation begins with a seed of its own, and none before it is run. The numbers are
    others than the constructor's then, though as random: for trials of which nobody needs the constructor's values.
    """

    def __init__(self, log: Log, seed: int, *, in_order: bool = True) -> None:
        self._log = log
        self._seed = seed
        self._in_order = in_order
        self._kept: dict[int, torch.Tensor] = {}  # state before the draw of that number
        self._latest: tuple[int, torch.Tensor] | None = None  # the same, for the draw after the last one that was made
        self._drawn = 0  # numbers since the last state that was kept
        self._spacing = 0  # of states that are kept, in numbers; 0 before the first draw

    def enter(self, draw: int) -> None:
        """Puts the generator into the state before random operation number `draw`."""
        if world().is_simulated or not self._in_order:  # in a simulated world values are of no interest
            torch.default_generator.manual_seed(self._seed if self._in_order else self._seed + 1 + draw)
            return
        if not self._spacing:
            numbers = sum(_numbers_of(self._log.operations[index]) for index in self._log.draws)
            self._spacing = max(numbers // _STATES_KEPT, 1)
            torch.default_generator.manual_seed(self._seed)
            self._kept[0] = torch.default_generator.get_state()
        if self._latest is not None and self._latest[0] <= draw:
            nearest, state = self._latest
        else:
            nearest = max(kept for kept in self._kept if kept <= draw)
            state = self._kept[nearest]
        torch.default_generator.set_state(state)
        for number in range(nearest, draw):
            self._skip(self._log.draws[number])
            self.leave(number)

    def leave(self, draw: int) -> None:
        """Notes the state of the generator, which has just made random operation number `draw`."""
        if world().is_simulated or not self._in_order:
            return
        self._latest = draw + 1, torch.default_generator.get_state()
        self._drawn += _numbers_of(self._log.operations[self._log.draws[draw]])
        if self._drawn >= self._spacing:
            self._kept[draw + 1] = self._latest[1]
            self._drawn = 0

    def _skip(self, index: int) -> None:
        """Makes the draws of an operation whose result is not needed."""
        operation = self._log.operations[index]
        refs = [leaf for leaf in operation.arguments.leaves if isinstance(leaf, TensorRef)]
        packet = getattr(operation.func, "overloadpacket", None)
        overwrites = len(refs) == 1 and refs[0].storage in operation.writes
        if overwrites or packet in _ANY_CONTENT or not refs:
            _call(operation, lambda ref: torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device="cpu"))
            return
        # How many numbers it takes may depend on what it is given.
        state = torch.default_generator.get_state()
        storages: dict[int, torch.UntypedStorage] = {}
        for needed in self._log.needed_for(operation.reads, before=index):
            _run(needed, storages, self._log, self)
        torch.default_generator.set_state(state)
        _call(operation, lambda ref: _rebuild(ref, storages, self._log))


def _numbers_of(operation: LoggedOperation) -> int:
    """About how many random numbers an operation draws."""
    refs = [leaf for leaf in operation.arguments.leaves if isinstance(leaf, TensorRef)]
    return max((math.prod(ref.size) for ref in (*refs, *(ref for _, ref in operation.outputs))), default=0)


def replay(log: Log, target: TensorRef, states: RandomStates) -> torch.Tensor:
    """The value of a recorded tensor at the end of the recording.

    Runs only the operations it needs, and frees each storage after its last use. A random operation draws what it
    would draw in the whole constructor, from torch's CPU generator, which is left as it was.

    Args:
        log: The recorded operations.
        target: The tensor to compute.
        states: Of the generator, for the random operations of `log`.

    Returns:
        A CPU tensor with its own memory.
    """
    operations = log.needed_for([target.storage])
    last_use = {
        storage: index for index, operation in enumerate(operations) for storage in operation.reads | operation.writes
    }
    storages: dict[int, torch.UntypedStorage] = {}
    with _global_state_kept(), torch.no_grad():
        for index, operation in enumerate(operations):
            _run(operation, storages, log, states)
            for storage in operation.reads | operation.writes:
                if last_use[storage] == index and storage != target.storage:
                    storages.pop(storage, None)
    return _rebuild(target, storages, log)


def _run(operation: LoggedOperation, storages: dict[int, torch.UntypedStorage], log: Log, states: RandomStates) -> None:
    if operation.draw is not None:
        states.enter(operation.draw)
    outputs = _call(operation, lambda ref: _rebuild(ref, storages, log))
    if operation.draw is not None:
        states.leave(operation.draw)
    for position, ref in operation.outputs:
        output = outputs[position]
        if operation.makes_room:
            output.zero_()  # so that every process and every replay sees the same
        storages[ref.storage] = _with_strides(output, ref, storages).untyped_storage()


def _call(operation: LoggedOperation, tensor: Callable[[TensorRef], torch.Tensor]) -> list[Any]:
    """The flattened results of an operation, which is given ``tensor(ref)`` for each tensor that it was given."""
    leaves = [tensor(leaf) if isinstance(leaf, TensorRef) else leaf for leaf in operation.arguments.leaves]
    args, kwargs = tree_unflatten(leaves, operation.arguments.spec)
    if torch.get_default_dtype() != operation.default_dtype:
        torch.set_default_dtype(operation.default_dtype)
    return tree_leaves(operation.func(*args, **kwargs))


def _rebuild(ref: TensorRef, storages: dict[int, torch.UntypedStorage], log: Log) -> torch.Tensor:
    """The tensor at `ref`. If its storage does not exist yet, it is allocated: it is about to be filled whole."""
    storage = storages.get(ref.storage)
    if storage is None:
        storage = storages[ref.storage] = torch.UntypedStorage(log.sizes[ref.storage])
    elif storage.nbytes() < log.sizes[ref.storage]:
        storage.resize_(log.sizes[ref.storage])
    return torch.empty(0, dtype=ref.dtype, device="cpu").set_(storage, ref.offset, ref.size, ref.stride)


def _with_strides(output: torch.Tensor, ref: TensorRef, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """`output` as it was recorded: with the strides that later operations rely on, and in its own memory.

    Fake tensors nearly always get both right. One exception is `native_dropout` in evaluation, which returns its input.
    """
    borrowed = storage_address(output.untyped_storage()) in map(storage_address, storages.values())
    if not borrowed and output.stride() == ref.stride and output.storage_offset() == ref.offset:
        return output
    blank = torch.UntypedStorage(0)
    made = torch.empty(0, dtype=ref.dtype, device="cpu").set_(blank, ref.offset, ref.size, ref.stride)
    return made.copy_(output)


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """torch's CPU generator and default dtype, restored on leaving."""
    generator, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.default_generator.set_state(generator)
        torch.set_default_dtype(dtype)
