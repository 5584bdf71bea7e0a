"""Ranks that are threads of one process, to check a model without others."""

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tensorshard.context_parallel.context_group import ContextGroup, Finish

_TIMEOUT = 100.0


class _Board:
    """Where the threads leave what they exchange."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.errors: list[str] = []

    def share(self, rank: int, mine: Any) -> list[Any]:
        """What every rank has left."""
        self.slots[rank] = mine
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class SimulatedGroup(ContextGroup):
    """A group whose ranks are threads. Each exchange is compared between them, and random numbers are drawn once."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        super().__init__(rank, size, self._exchange_in_memory)
        self._board = board

    def _exchange_in_memory(self, pieces: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> Finish:
        everyone = self._board.share(self.rank, (self.call, pieces))
        calls = {call for call, _ in everyone}
        if len(calls) > 1:
            raise RuntimeError(f"the ranks make different exchanges: {sorted(calls)}")
        got = [theirs[self.rank].detach().clone() for _, theirs in everyone]
        self._board.barrier.wait()  # what others still read must not be changed
        for piece, shape in zip(got, shapes, strict=True):
            if piece.shape != torch.Size(shape):
                raise RuntimeError(f"{self.call}: a rank sent {list(piece.shape)}, expected was {list(shape)}")
        return lambda: got

    def draw(self, function: Callable[[], Any]) -> Any:
        mine = function() if self.rank == 0 else None
        drawn = self._board.share(self.rank, mine)[0]
        result = drawn.clone()
        self._board.barrier.wait()
        return result


def simulate(size: int, function: Callable[[ContextGroup], Any]) -> list[Any]:
    """``function(group)`` on each rank, at the same time.

    Raises:
        RuntimeError: a rank failed; with its traceback.
    """
    board, results = _Board(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(SimulatedGroup(rank, size, board))
        except threading.BrokenBarrierError:
            pass
        except BaseException:
            board.errors.append(traceback.format_exc())
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if board.errors:
        raise RuntimeError(board.errors[0])
    return results
