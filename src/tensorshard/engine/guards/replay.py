"""Whether a rank computes the same twice: forward and backward are repeated, and compared operation by operation.

A processor or a memory that returns a wrong number now and then ("silent data corruption") stops no run, and its
numbers reach every rank within a step. The same work on the same inputs, done twice by one rank, shows it. Meta and
Google have described such machines ("Silent Data Corruptions at Scale", "Cores that don't count", both of 2021).
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.model.call_stack import users_line
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.operators import schema
from tensorshard.torch_private.pytree import tree_leaves

_FROM_OUTSIDE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "symm_mem")
"""Namespaces of the operators that other ranks write to, now or later."""

_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""Operators whose result is whatever the memory held."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplayMismatchError(RuntimeError):
    """A rank computed something else when it repeated its work. Every rank raises it, before the update."""


@dataclass(frozen=True)
class _Seen:
    """A tensor that an operator took or gave: where its sum of bits will be, and the address of its memory."""

    index: int
    memory: int


@dataclass(frozen=True)
class _Operation:
    name: str
    others: str  # the arguments that are no tensors
    inputs: list[_Seen]
    outputs: list[_Seen]
    writes: bool  # to its own arguments
    line: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for the same operator with other numbers in its tensors."""
        return self.name, self.others, len(self.inputs), len(self.outputs)

    @property
    def computes(self) -> bool:
        """Whether the result is new memory, which depends on all that the operator takes."""
        return not self.writes and not {seen.memory for seen in self.inputs} & {seen.memory for seen in self.outputs}

    @property
    def is_from_outside(self) -> bool:
        return self.name.split(".")[0] in _FROM_OUTSIDE

    @property
    def is_unset(self) -> bool:
        return self.name.split(".")[1] in _UNSET


class Operations(TorchDispatchMode):
    """Inside, each operator is noted with a sum of the bits of every tensor that it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._sums: list[torch.Tensor] = []
        self._known: list[int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a tensor subclass says itself which operators it runs on which tensors
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        inputs = [self._see(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = repr([leaf for leaf in leaves if isinstance(leaf, int | float | complex | str | torch.dtype)])
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        described = schema(func)
        writes = described.is_mutable
        if writes:
            given += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outputs = [self._see(tensor) for tensor in given]
        name = f"{func.namespace}.{described.name.split('::')[1]}"
        if func.namespace in _FROM_OUTSIDE:
            others = ""
        self.operations.append(_Operation(name, others, inputs, outputs, writes, users_line()))
        return result

    def _see(self, tensor: torch.Tensor) -> _Seen:
        self._sums.append(_sum_of_bits(tensor.detach()))
        memory = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        return _Seen(len(self._sums) - 1, memory)

    def sum(self, seen: _Seen) -> int:
        """The sum of the bits of a tensor. The first call waits for the device."""
        if self._known is None:
            self._known = torch.stack([each.cpu() for each in self._sums]).tolist() if self._sums else []
        return self._known[seen.index]


def _record(work: Callable[[], Any]) -> Operations:
    with Operations() as record:
        work()
    return record


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return torch.zeros((), dtype=torch.int64)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


@dataclass(frozen=True)
class Difference:
    """What a rank did otherwise the second time.

    Args:
        text: says it.
        place: how many operators ran before.
        is_own: whether the rank did it by itself: its numbers do not come from others.
    """

    text: str
    place: int
    is_own: bool


def first_difference(first: Operations, second: Operations) -> Difference | None:
    """Where an operator gave other numbers for the same ones, or else where one first took other numbers."""
    pairs = _matched(first.operations, second.operations)
    extra = _memory_written(first, {row for row, _ in pairs}), _memory_written(second, {row for _, row in pairs})
    taken = None
    for place, (row, other) in enumerate(pairs):
        one, two = first.operations[row], second.operations[other]
        if one.is_from_outside or one.is_unset:
            continue
        changed = [(a, b) for a, b in zip(one.inputs, two.inputs, strict=True) if first.sum(a) != second.sum(b)]
        if all(first.sum(a) == second.sum(b) for a, b in zip(one.outputs, two.outputs, strict=True)):
            continue
        if not changed:
            return Difference(f"{_text(one)} gave other numbers the second time", place, True)
        if taken is None and one.computes:
            own = any(a.memory in extra[0] or b.memory in extra[1] for a, b in changed)
            what = "numbers that another operator had written" if own else "other numbers"
            taken = Difference(f"{_text(one)} took {what} the second time", place, own)
    return taken


def _matched(first: list[_Operation], second: list[_Operation]) -> list[tuple[int, int]]:
    """The operators that both have done, in order. One of them may have filled a cache, or finished earlier work."""
    one, two = ([operation.key for operation in operations] for operations in (first, second))
    begin = next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    pairs = [(k, k) for k in range(begin)]
    for block in SequenceMatcher(None, one[begin:], two[begin:], autojunk=False).get_matching_blocks():
        pairs += [(begin + block.a + k, begin + block.b + k) for k in range(block.size)]
    return pairs


def _memory_written(record: Operations, matched: set[int]) -> set[int]:
    """Where the operators wrote that only this record has."""
    others = [operation for row, operation in enumerate(record.operations) if row not in matched]
    return {seen.memory for operation in others for seen in operation.outputs}


def _text(operation: _Operation) -> str:
    name = operation.name.removeprefix("aten.")
    return f"{name} ({operation.line})" if operation.line else name


def compare_repeated(work: Callable[[], Any], group: dist.ProcessGroup) -> None:
    """Does `work` twice, and compares. A collective of `group`.

    Args:
        work: is the same each time: it restores what it changes.
        group: all ranks.

    Raises:
        ReplayMismatchError: the work of some rank gave other bits. It names these ranks.
    """
    records = _record(work), _record(work)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (first_difference(*records), socket.gethostname()), group=group)
    differences = [
        (rank, difference, host) for rank, (difference, host) in enumerate(everyone) if difference is not None
    ]
    guilty = [each for each in differences if each[1].is_own] or sorted(differences, key=lambda each: each[1].place)[:1]
    if guilty:
        which = ", ".join(f"rank {rank} (on {host}): {difference.text}" for rank, difference, host in guilty)
        raise ReplayMismatchError(
            f"the same forward and backward, done twice with the same weights, batch and random numbers, differ. "
            f"{which}. Nothing was updated. A processor or memory there may be damaged: go on from the last checkpoint "
            f"without that machine. A model that does something else each time it is called, or a kernel that sums in "
            f"no fixed order, cannot be checked so (train.replay_every=0)"
        )
