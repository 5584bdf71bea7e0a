"""Moving tiles between their tiers and buffers while others are computed with."""

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from tensorshard.offload.scratch_file import round_up
from tensorshard.offload.slots import TILE_ALIGNMENT, Slot
from tensorshard.torch_private.fake_tensors import active_fake_mode

_THREADS = 8  # requests under way at once; a disk is at its full rate with four of some MiB each


@dataclass(frozen=True)
class Move:
    """A tile of one slot, which is read before its work and written after it.

    Args:
        start, numel: which elements.
        read: whether its old values are needed; else it is zeros.
        write: whether it has new values.
    """

    slot: Slot
    start: int
    numel: int
    dtype: torch.dtype
    read: bool = True
    write: bool = True

    @property
    def buffer_bytes(self) -> int:
        return round_up(self.numel * self.dtype.itemsize)


@dataclass(frozen=True)
class Work:
    """What is computed with some tiles at once.

    Args:
        compute: called with a tensor for each of `moves`, [numel], which is its own until it returns.
        written: called when all moves are written; None for nothing.
    """

    moves: Sequence[Move]
    compute: Callable[[list[torch.Tensor]], None]
    written: Callable[[], None] | None = None

    @property
    def buffer_bytes(self) -> int:
        return sum(move.buffer_bytes for move in self.moves)


@dataclass
class _UnderWay:
    work: Work
    buffer: mmap.mmap
    tensors: list[torch.Tensor] = field(default_factory=list)
    memories: list[memoryview] = field(default_factory=list)
    transfers: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.result()
        self.transfers.clear()


class Reading:
    """Bytes that are being read into memory of their own."""

    def __init__(self, nbytes: int) -> None:
        self.memory: mmap.mmap | None = None  # on fake tensors
        if active_fake_mode() is not None:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        else:
            self.memory = mmap.mmap(-1, round_up(nbytes))  # aligned to pages
            self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes)
        self.transfers: list[Future[None]] = []

    def wait(self) -> torch.Tensor:
        """All of them, [nbytes] of uint8.

        Raises:
            OSError: the disk failed.
        """
        for transfer in self.transfers:
            transfer.result()
        return self.tensor


def _nothing(_: list[torch.Tensor]) -> None:
    """What is computed where tiles are written alone."""


class Transfers:
    """A fixed number of buffers, and threads that fill and empty them.

    Args:
        buffer_bytes: of all buffers together.
        largest: bytes of the largest work's buffer.
        threads: how many requests are under way at once.
    """

    def __init__(self, buffer_bytes: int, largest: int, threads: int = _THREADS) -> None:
        self._largest = round_up(max(largest, 16 * TILE_ALIGNMENT))
        self._count = max(1, buffer_bytes // self._largest)
        self._threads = threads
        self._buffers: list[mmap.mmap] = []  # made when they are first needed, aligned to pages
        self._made = 0
        self._pool: ThreadPoolExecutor | None = None
        self._written: deque[_UnderWay] = deque()  # by write

    def write(self, slot: Slot, values: torch.Tensor) -> list[Future[None]]:
        """Has all of `slot` written in the background; `values`, [numel], may change once this returns.

        Returns:
            What is under way then.

        Raises:
            OSError: the disk failed, with this or an earlier write.
        """
        if active_fake_mode() is not None:
            slot.moved += round_up(values.nbytes)
            return []
        begun: list[Future[None]] = []
        each = self._largest // values.dtype.itemsize // TILE_ALIGNMENT * TILE_ALIGNMENT
        for start in range(0, values.numel(), each):
            part = values[start : start + each]
            move = Move(slot, start, part.numel(), values.dtype, read=False)
            started = self._start(Work([move], _nothing), self._written, zero=False)
            self._written.append(started)
            started.tensors[0].copy_(part)
            self._submit_writes(started)
            begun += started.transfers
        return begun

    def read(self, slot: Slot, nbytes: int) -> Reading:
        """Begins to read the first bytes of `slot`, whose elements are bytes."""
        reading = Reading(nbytes)
        slot.moved += round_up(nbytes)
        if reading.memory is None:
            return reading
        view = memoryview(reading.memory)
        each = self._largest // TILE_ALIGNMENT * TILE_ALIGNMENT
        for start in range(0, nbytes, each):
            part = reading.tensor[start : start + each]
            memory = view[start : start + round_up(part.numel())]
            reading.transfers.append(self._threads_of_pool().submit(slot.read, start, part, memory))
        return reading

    def drain(self) -> None:
        """Waits until all that :meth:`write` began is written.

        Raises:
            OSError: the disk failed.
        """
        failure: OSError | None = None
        while self._written:
            try:
                self._recycle(self._written.popleft())
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def run(self, works: Iterable[Work]) -> None:
        """Does each of `works` in turn, here, while threads read what comes next and write what was done.

        Raises:
            OSError: the disk failed. All threads are at rest then.
        """
        if active_fake_mode() is not None:
            self._run_without_memory(works)
            return
        self.drain()
        ahead: deque[_UnderWay] = deque()
        behind: deque[_UnderWay] = deque()
        most_ahead = self._count // 2 if self._count > 2 else 0
        try:
            for work in works:
                ahead.append(self._start(work, behind))
                if len(ahead) > most_ahead:
                    self._finish(ahead.popleft(), behind)
            while ahead:
                self._finish(ahead.popleft(), behind)
            while behind:
                self._recycle(behind.popleft())
        except BaseException:
            for under_way in (*ahead, *behind):
                for transfer in under_way.transfers:
                    transfer.cancel()
                    transfer.exception() if not transfer.cancelled() else None
                self._buffers.append(under_way.buffer)
            raise

    def _run_without_memory(self, works: Iterable[Work]) -> None:
        """Computes on fake tensors, and counts what would be moved."""
        for work in works:
            for move in work.moves:
                move.slot.moved += move.buffer_bytes * (move.read + move.write)
            work.compute([torch.empty(move.numel, dtype=move.dtype) for move in work.moves])

    def _start(self, work: Work, behind: deque[_UnderWay], zero: bool = True) -> _UnderWay:
        pool = self._threads_of_pool()
        if work.buffer_bytes > self._largest:
            raise ValueError(f"a work needs {work.buffer_bytes} bytes, and buffers have {self._largest}")
        started = _UnderWay(work, self._buffer(behind))
        view, offset = memoryview(started.buffer), 0
        for move in work.moves:
            memory = view[offset : offset + move.buffer_bytes]
            tensor = torch.empty(0, dtype=move.dtype)
            if move.numel:
                tensor = torch.frombuffer(started.buffer, dtype=move.dtype, count=move.numel, offset=offset)
            offset += move.buffer_bytes
            started.tensors.append(tensor)
            started.memories.append(memory)
            if move.read:
                move.slot.moved += move.buffer_bytes
                started.transfers.append(pool.submit(move.slot.read, move.start, tensor, memory))
            elif zero:
                tensor.zero_()
        return started

    def _threads_of_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tensorshard-offload")
        return self._pool

    def _buffer(self, behind: deque[_UnderWay]) -> mmap.mmap:
        if not self._buffers and self._made < self._count:
            self._made += 1
            return mmap.mmap(-1, self._largest)
        while not self._buffers:
            self._recycle(behind.popleft())
        return self._buffers.pop()

    def _recycle(self, written: _UnderWay) -> None:
        try:
            written.wait()
        finally:
            self._buffers.append(written.buffer)
        if written.work.written is not None:
            written.work.written()

    def _finish(self, started: _UnderWay, behind: deque[_UnderWay]) -> None:
        behind.append(started)  # where a failure finds it
        started.wait()
        started.work.compute(started.tensors)
        self._submit_writes(started)

    def _submit_writes(self, started: _UnderWay) -> None:
        assert self._pool is not None
        for move, tensor, memory in zip(started.work.moves, started.tensors, started.memories, strict=True):
            if move.write:
                move.slot.moved += move.buffer_bytes
                started.transfers.append(self._pool.submit(move.slot.write, move.start, tensor, memory))
