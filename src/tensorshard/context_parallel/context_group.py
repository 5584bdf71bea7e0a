"""The ranks that share one sequence, seen from one of them.

Also here: which context-parallel group a thread works for, and what of torch is replaced meanwhile.

A replacement is in place while any thread works for a group; it asks :func:`active` which one its own thread works for,
and does what torch does where that is none.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.primitives import start_exchange
from tensorshard.comm.world import ranks_here
from tensorshard.torch_private.patches import replaced
from tensorshard.torch_private.process_groups import LocalGroup

_OURS = os.path.dirname(__file__)
_PRIVATE = os.path.join(os.path.dirname(_OURS), "torch_private")
_TORCH = os.path.dirname(torch.__file__)

Finish = Callable[[], list[torch.Tensor]]
"""Waits for an exchange, and returns what each rank has sent."""
Exchange = Callable[[list[torch.Tensor], list[tuple[int, ...]]], Finish]
"""Starts an all-to-all: piece i goes to rank i, and pieces of the given shapes come."""
_local = threading.local()
_lock = threading.Lock()
_users = 0


class ContextGroup:
    """This rank, the others, and what they have exchanged.

    Args:
        rank: of this process (or thread) in the group.
        size: how many ranks there are.
        exchange: starts to move data.
        neighbours: how many consecutive ranks share a machine, a divisor of `size`; None for all.

    Attributes:
        received: bytes that came from other ranks, by what they were for. What backward exchanges ends in ``'``.
        received_across: of these, bytes from other machines.
        calls: exchanges, by what they were for.
        fallbacks: (operation, line of the user's code) -> how often it was computed on whole tensors.
        causal_calls: how often causal attention was computed, in which later positions take longer.
        call: describes the exchange under way, equal on all ranks that make the same one.
        pieces: plain tensors that are views of sequence tensors in torch, see :mod:`views`.
        refetches: whether backward fetches the keys and values of attention again, instead of keeping all ranks'.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange, neighbours: int | None = None) -> None:
        self.rank, self.size, self.neighbours = rank, size, neighbours or size
        self.received: Counter[str] = Counter()
        self.received_across: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.causal_calls = 0
        self.call = ""
        self.refetches = False
        self.pieces: list[Any] = []
        self._exchange = exchange
        self._number = 0

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> "ContextGroup":
        """The ranks of a process group of torch, on Gloo or NCCL."""

        def exchange(pieces: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> Finish:
            sizes = [torch.Size(shape).numel() for shape in shapes]
            finish = start_exchange([[piece.reshape(-1)] for piece in pieces], sizes, pieces[0], process_group)
            return lambda: [part.view(shape) for part, shape in zip(finish(), shapes, strict=True)]

        return cls(process_group.rank(), process_group.size(), exchange, _neighbours(process_group))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, autograd functions that know no sequence tensors are given whole ones, and positions that a model
        counts with ``torch.arange`` are cut."""
        with activated(Activation(self)):
            yield

    def number_call(self) -> int:
        """A number for an exchange that a forward is about to make; its backward gets the same."""
        self._number += 1
        return self._number

    def exchange(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], what: str, number: int
    ) -> list[torch.Tensor]:
        """Sends ``pieces[r]`` to rank r, and returns what each rank has sent. Arguments are those of :meth:`start`."""
        return self.start(pieces, shapes, what, number)()

    def start(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], what: str, number: int
    ) -> Finish:
        """Starts sending ``pieces[r]`` to rank r.

        Args:
            shapes: of what each rank sends to this one.
            what: it is for.
            number: of the call, from :meth:`number_call`.
        """
        self.call = f"{what} ({number})"
        if self.size == 1:
            return lambda: list(pieces)
        finish = self._exchange([piece.contiguous() for piece in pieces], list(shapes))
        for rank, shape in enumerate(shapes):
            nbytes = torch.Size(shape).numel() * pieces[0].element_size() * (rank != self.rank)
            self.received[what] += nbytes
            if rank // self.neighbours != self.rank // self.neighbours:
                self.received_across[what] += nbytes
        self.calls[what] += 1
        return finish

    def draw(self, function: Callable[[], Any]) -> Any:
        """Random numbers of whole tensors. All ranks have the same generator state and draw the same."""
        return function()

    def note_fallback(self, operation: str) -> None:
        """Counts an operation that is computed on whole tensors."""
        self.fallbacks[operation, _line_of_caller()] += 1

    def __deepcopy__(self, memo: Any) -> "ContextGroup":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a group of context parallelism belongs to its process; it cannot be pickled")


def _neighbours(process_group: dist.ProcessGroup) -> int | None:
    """How many consecutive ranks of a group share a machine; None if all do, or if machines have some more or less."""
    if isinstance(process_group, LocalGroup):  # of simulated ranks
        return None
    machines = [rank // ranks_here() for rank in dist.get_process_group_ranks(process_group)]
    count = machines.count(machines[0])
    regular = machines == sorted(machines) and set(Counter(machines).values()) == {count}
    return count if regular else None


def _line_of_caller() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, _PRIVATE, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@dataclass
class Activation:
    """A group for which code runs.

    Attributes:
        group: a ContextGroup.
        layouts: of the sequences that were cut for this code, by their lengths.
        seen_keys: what attention has found in masks.
    """

    group: Any
    layouts: dict[int, Any] = field(default_factory=dict)
    seen_keys: dict[Any, Any] = field(default_factory=dict)


_replacements: list[tuple[Any, str, Callable[[Any], Any]]] = []
_replaced = ExitStack()
_preparations: list[Callable[[], None]] = []


def replace_while_active(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Registers, when this package is imported, an attribute that is replaced while a thread works for a group:
    ``make(original)`` stands in its place."""
    _replacements.append((owner, name, make))


def prepare_before_active(prepare: Callable[[], None]) -> None:
    """Registers what is called whenever the first thread begins to work for a group."""
    _preparations.append(prepare)


def active() -> Activation | None:
    """What this thread works for."""
    return getattr(_local, "activation", None)


@contextmanager
def activated(activation: Activation | None) -> Iterator[None]:
    """Works for a group inside, or for none. It may be entered again, in other threads too."""
    before = active()
    _enter()
    _local.activation = activation
    try:
        yield
    finally:
        _local.activation = before
        _leave()


def _enter() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users += 1
        if _users == 1:
            for prepare in _preparations:
                prepare()
            for each in _replacements:
                _replaced.enter_context(replaced(*each))


def _leave() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users == 0:
            _replaced.close()
