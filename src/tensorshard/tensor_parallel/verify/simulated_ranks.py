"""Simulated ranks: threads of one process, so that a table can be verified without starting processes.

The code that runs is the code that trains; only the group is another. (torch's own tests have a threaded process group,
which installs itself for the whole process. This one is an object like any other.) :func:`fake_process_group` is one
rank alone, and shows the shapes that it computes.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorshard.torch_private.process_groups import LocalGroup

_TIMEOUT_SECONDS = 120.0
_Result = TypeVar("_Result")


class _Board:
    """Where the ranks put what they send.

    Args:
        size: number of ranks.
        needed: set once a rank waits for the others.
    """

    def __init__(self, size: int, needed: threading.Event) -> None:
        self.slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_SECONDS)
        self._needed = needed

    def wait(self) -> None:
        """Waits until all ranks are here."""
        self._needed.set()
        self._barrier.wait()

    def abort(self) -> None:
        """Releases the ranks that wait, and those that will."""
        self._barrier.abort()


class _ThreadComm:
    """Sums and gathers between threads. Tensor parallelism needs no other collectives."""

    name = "threads"

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    def all_reduce(self, tensor: torch.Tensor) -> None:
        total = torch.stack(self._exchange(tensor)).sum(0)
        self._board.wait()  # all ranks have read before any writes
        tensor.copy_(total)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(torch.cat([part.flatten() for part in self._exchange(input)]).view_as(output))
        self._board.wait()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        total = torch.stack([part.flatten() for part in self._exchange(input)]).sum(0)
        output.copy_(total.chunk(len(self._board.slots))[self._rank].view_as(output))
        self._board.wait()

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        sent = self._exchange(input.detach().split(input_splits))
        output.copy_(torch.cat([parts[self._rank] for parts in sent]))
        self._board.wait()

    def _exchange(self, sent: Any) -> list[Any]:
        self._board.slots[self._rank] = sent.detach() if isinstance(sent, torch.Tensor) else sent
        self._board.wait()
        return list(self._board.slots)


def run_as_ranks(size: int, function: Callable[[dist.ProcessGroup], _Result]) -> list[_Result]:
    """What `function(group)` returns on each of `size` simulated ranks.

    The first rank starts alone. The others start when it waits for them, or has returned. Many wrong ways to split fail
    on the first rank before that.

    Raises:
        The error of the first rank that failed. The other ranks are released.
    """
    needed = threading.Event()
    board = _Board(size, needed)
    results: dict[int, _Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(LocalGroup(_ThreadComm(board, rank), rank, size))
        except threading.BrokenBarrierError:
            pass  # another rank failed, and its reason is the one to report
        except BaseException as error:
            failures.append(error)
            board.abort()
        finally:
            needed.set()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for rank, thread in enumerate(threads):
        if rank == 1:
            needed.wait()
        if not failures:
            thread.start()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if failures:
        raise failures[0]
    if len(results) < size:
        raise RuntimeError(f"the ranks waited for each other longer than {_TIMEOUT_SECONDS:.0f} s")
    return [results[rank] for rank in range(size)]


def fake_process_group(rank: int, size: int) -> dist.ProcessGroup:
    """A group that treats the other ranks' tensors as equal to this rank's. No bytes are sent.

    Args:
        rank: this process's rank in the group.
        size: the number of ranks that the group pretends to have.
    """
    return LocalGroup(_Silent(size), rank, size)


class _Silent:
    name = "silent"

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Does nothing: only shapes count."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.view(self._size, -1).copy_(input.reshape(1, -1))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(input.reshape(-1)[: output.numel()].view_as(output))

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        """Does nothing: only shapes count."""
