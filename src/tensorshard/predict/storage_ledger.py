"""A ledger of storages: what is allocated and freed in a run, in order, on real tensors or on fake ones."""

import weakref
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorshard.model.call_stack import users_line
from tensorshard.predict.operation_ledger import OperationLedger
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.dispatch import TorchDispatchMode, without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import shard_of
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import DEVICE, FakeTensor, active_fake_mode, fake_device
from tensorshard.torch_private.pytree import tree_leaves
from tensorshard.torch_private.tensors import storage_address, watched_resizes


@dataclass
class Allocation:
    """One storage.

    Args:
        phase: the phase in which it was made: "initialization", "forward", "backward" or "update".
        operation: the operation that made it.
        shape, dtype: those of the first tensor that was seen on it.
        line: the line of the user's code that made it, see :func:`users_line`; "" if it was made before the steps.
        resized: whether it was emptied and filled again, as those of gathered parameters are.
    """

    number: int
    phase: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: str = ""
    resized: bool = False


@dataclass(frozen=True)
class Event:
    """A storage grows or shrinks by some bytes."""

    number: int
    nbytes: int
    phase: str


class StorageLedger(TorchDispatchMode):
    """Notes every storage that operations within it make, how large it is, and when it goes.

    Views and in-place operations add nothing. What one kernel allocates and frees inside of itself is not seen. The
    idea is that of torch's MemTracker, without its modules and without rounding.

    Args:
        counts: tells whether a storage is on the device that is watched; None if all are.
        is_late: whether there are storages already. They are added when an operation first uses them.
        operations: a ledger that counts the operations, too; None for none.

    Attributes:
        allocations: all storages, by their numbers.
        events: all events, in order.
        initializing: whether storages that are made now belong to the model and its Engine.
        updating: whether the optimizer runs now.
        start: the number of events before the first step.
    """

    def __init__(
        self,
        counts: Callable[[torch.UntypedStorage], bool] | None = None,
        *,
        is_late: bool = False,
        operations: OperationLedger | None = None,
    ) -> None:
        super().__init__()
        self._counts = counts
        self._is_late = is_late
        self._operations = operations
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.initializing = True
        self.updating = False
        self.start = 0
        self._numbers: dict[int, int] = {}  # the numbers of live storages, by their address as objects
        self._sizes: dict[int, int] = {}
        self._resizes: AbstractContextManager[None] | None = None
        self._fake: QuickFakeTensorMode | None = None

    def __enter__(self) -> "StorageLedger":
        self._resizes = watched_resizes(self._resized)
        self._resizes.__enter__()
        mode = active_fake_mode()
        self._fake = mode if isinstance(mode, QuickFakeTensorMode) else None
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        assert self._resizes is not None
        self._resizes.__exit__(*exception)
        self._fake = None

    def initialized(self) -> None:
        """Ends the initialization: the model and its Engine are built, and steps follow."""
        self.initializing = False
        self.start = len(self.events)

    def phase(self) -> str:
        """What is going on: "initialization", "forward", "backward" or "update"."""
        if self.initializing:
            return "initialization"
        if self.updating:
            return "update"
        return "backward" if is_in_backward() else "forward"

    def leave_out(self, numbers: Container[int]) -> None:
        """Removes the events of storages that are not in the device's memory."""
        before = self.events[: self.start]
        self.start -= sum(event.number in numbers for event in before)
        self.events = [event for event in self.events if event.number not in numbers]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None if the ledger has not seen it."""
        return self._numbers.get(storage_address(_storage(tensor)))

    def note(self, tensor: torch.Tensor, operation: object) -> None:
        """Adds the storage of `tensor`, unless it is known. `operation` made it."""
        # Asking a fake tensor whether it is one of shapes alone would call its mode.
        if tensor.fake_device.type == "meta" if type(tensor) is FakeTensor else tensor.is_meta:
            return
        storage = _storage(tensor)
        if storage_address(storage) not in self._numbers and (self._counts is None or self._counts(storage)):
            self._add(storage, str(operation), tuple(tensor.shape), tensor.dtype)

    def _add(self, storage: torch.UntypedStorage, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        number = len(self.allocations)
        line = "" if self.initializing else users_line()
        self.allocations.append(Allocation(number, self.phase(), operation, shape, dtype, line))
        key = storage_address(storage)
        self._numbers[key] = number
        self._sizes[number] = 0
        self._change(number, storage.nbytes())
        weakref.finalize(storage, self._freed, key, number).atexit = False
        return number

    def _note_earlier(self, tensor: torch.Tensor) -> None:
        """Adds the storage of a tensor that is older than the ledger, as if it had been seen from the start."""
        before, self.initializing = len(self.events), True
        self.note(tensor, "made before")
        self.initializing = False
        while len(self.events) > before:
            self.events.insert(self.start, self.events.pop())
            self.start += 1
            before += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # autograd asks for a tensor's device in most calls
            device = fake_device(args[0])
            return func(*args) if device is None else device
        if self._is_late and not self.initializing:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._note_earlier(leaf)
        kwargs = kwargs or {}
        operations = self._operations
        if operations is not None and not operations.recording:
            operations = None
        if operations is not None and any(issubclass(kind, DTensor) for kind in types):
            with operations:  # as a dispatch mode, it sees what is done to the shards
                output = func(*args, **kwargs)
        else:
            known = None
            if self._fake is not None and self._fake.is_active():
                output, known = self._fake.call(func, args, kwargs)
            else:
                output = func(*args, **kwargs)
            if operations is not None:
                operations.note(func, args, kwargs, output, known)
        if isinstance(output, torch.Tensor):
            self.note(output, func)
        elif output is not None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    self.note(leaf, func)
        return output

    def _change(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        self._sizes[number] = size
        if change:
            self.events.append(Event(number, change, self.phase()))

    def _freed(self, key: int, number: int) -> None:
        del self._numbers[key]
        self._change(number, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._numbers.get(storage_address(storage))
        if number is None:
            if not storage.nbytes():
                return
            # A storage that is older than the ledger, and was empty until now.
            number = self._add(storage, "resize_", (storage.nbytes(),), torch.uint8)
        self.allocations[number].resized = True
        self._change(number, storage.nbytes())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with without_torch_functions_of_tensors():  # a look is no use of a parameter that is whole only while it is used
        return shard_of(tensor).untyped_storage()
