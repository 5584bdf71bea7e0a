"""Moves tiles between host memory or disk and buffers, while other tiles are updated."""

import mmap
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from queue import SimpleQueue
from typing import Any

import torch

from tensorshard.comm.world import world
from tensorshard.common.sampled_loops import loop_slices
from tensorshard.offload.device_copies import CopyToHost, DeviceCopies
from tensorshard.offload.scratch_file import round_up
from tensorshard.offload.tiers import TILE_ALIGNMENT, Slot

_MOST_BYTES = 24  # of an element: its gradient, master weight, three states and fp32 copy
_THREADS = 8  # requests under way at once; a disk is at its full rate with four of some MiB each


@dataclass(frozen=True)
class Move:
    """A tile of one slot, which is read before its work and written after it.

    Args:
        start, numel: which elements.
        read: whether its old values are needed.
        write: whether it gets new values.
        zero: whether it has to be zeros if it is not read.
    """

    slot: Slot
    start: int
    numel: int
    dtype: torch.dtype
    read: bool = True
    write: bool = True
    zero: bool = True

    @property
    def buffer_bytes(self) -> int:
        return round_up(self.numel * self.dtype.itemsize)


@dataclass(frozen=True)
class Work:
    """A computation on some tiles at once.

    Args:
        compute: called with a tensor [numel] for each of `moves`. It may use them until it returns.
        written: called when all moves are written; None for no call.
        kind: works in a row that have the same kind compute the same on other elements, and do nothing else; None for a
            work that is like no other.
    """

    moves: Sequence[Move]
    compute: Callable[[list[torch.Tensor]], None]
    written: Callable[[], None] | None = None
    kind: Hashable = None

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
    """Bytes that are being read into new memory: the device's, if it has its own, else the host's.

    Args:
        copies: copies to the device; None if the device is the host.
    """

    def __init__(self, nbytes: int, copies: DeviceCopies | None = None) -> None:
        self.memory: mmap.mmap | None = None  # the host's
        self.tensor: torch.Tensor
        if world().is_simulated or copies is not None:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=None if copies is None else copies.device)
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


def _write_landed(started: _UnderWay, copy: CopyToHost | None) -> None:
    """Writes what was copied to a buffer; cast, if the slot has another type."""
    [move, *_] = started.work.moves
    if copy is not None:
        copy.wait()
    if len(started.tensors) > 1:
        started.tensors[0].copy_(started.tensors[1])
    move.slot.write(move.start, started.tensors[0], started.memories[0])


def _nothing(_: list[torch.Tensor]) -> None:
    """The computation of a work that only writes tiles."""


class Transfers:
    """A fixed number of buffers, and threads that fill and empty them.

    Args:
        buffer_bytes: of all buffers together.
        largest: bytes of the largest work's buffer.
        threads: how many requests are under way at once.
        copies: copies between the device and buffers, which are then pinned; None if the device is the host.
        reads: whether :meth:`read` will be called. With `copies`, that takes as many buffers again.

    Raises:
        RuntimeError: the driver refuses to pin the buffers.
    """

    def __init__(
        self,
        buffer_bytes: int,
        largest: int,
        threads: int = _THREADS,
        *,
        copies: DeviceCopies | None = None,
        reads: bool = False,
    ) -> None:
        self._largest = round_up(max(largest, _MOST_BYTES * TILE_ALIGNMENT))
        self._count = max(1, buffer_bytes // self._largest)
        self._threads = threads
        self._copies = copies
        self._buffers: list[mmap.mmap] = []  # made when they are first needed, aligned to pages
        self._made = 0
        self._landings: SimpleQueue[mmap.mmap] = SimpleQueue()  # buffers for what is read for a device
        if copies is not None and not world().is_simulated:  # all at once, so that a driver that refuses does so now
            self._buffers = [copies.buffer(self._largest) for _ in range(self._count)]
            self._made = self._count
            for _ in range(self._count if reads else 0):
                self._landings.put(copies.buffer(self._largest))
        self._pool: ThreadPoolExecutor | None = None
        self._written: deque[_UnderWay] = deque()  # by write

    def write(
        self,
        slot: Slot,
        values: torch.Tensor,
        dtype: torch.dtype | None = None,
        *,
        owner: torch.Tensor | None = None,
    ) -> list[Future[None]]:
        """Writes all of `slot` in the background. `values`, [numel], may change once this returns.

        Values on a device that is not the host may be freed then, but must not change before they are copied.

        Args:
            dtype: of the slot, to which the host casts `values`; None for their own.
            owner: a tensor in their memory, whose version shows in-place changes; None for `values`.

        Returns:
            The writes that are under way.

        Raises:
            OSError: the disk failed, with this or an earlier write.
        """
        dtype = dtype or values.dtype
        if world().is_simulated:
            slot.moved += round_up(values.numel() * dtype.itemsize)
            return []
        copies = self._copies if self._copies is not None and self._copies.holds(values) else None
        after = None if copies is None else copies.given()
        narrow = values.dtype != dtype
        begun: list[Future[None]] = []
        each = self.elements(dtype, values.dtype) if narrow else self.elements(dtype)
        for start in range(0, values.numel(), each):
            part = values[start : start + each]
            moves = [Move(slot, start, part.numel(), dtype, read=False, zero=False)]
            if narrow:
                moves.append(Move(slot, start, part.numel(), values.dtype, read=False, write=False, zero=False))
            started = self._start(Work(moves, _nothing), self._written)
            self._written.append(started)
            landed = started.tensors[-1]
            copy = None if copies is None else copies.to_host(landed, part, after, owner)
            if copy is None:
                landed.copy_(part)
            slot.moved += moves[0].buffer_bytes
            started.transfers.append(self._threads_of_pool().submit(_write_landed, started, copy))
            begun += started.transfers
        return begun

    def elements(self, *dtypes: torch.dtype) -> int:
        """How many elements of each of `dtypes` a buffer holds: the largest tile of so many tensors."""
        return self._largest // sum(dtype.itemsize for dtype in dtypes) // TILE_ALIGNMENT * TILE_ALIGNMENT

    def read(self, slot: Slot, nbytes: int) -> Reading:
        """Begins to read the first `nbytes` of `slot`, whose elements are bytes."""
        reading = Reading(nbytes, self._copies)
        slot.moved += round_up(nbytes)
        if world().is_simulated:
            return reading
        view = None if reading.memory is None else memoryview(reading.memory)
        # The new tensor's memory may have been another tensor's, with which the device still computes.
        after = None if self._copies is None else self._copies.given()
        each = self.elements(torch.uint8)
        for start in range(0, nbytes, each):
            part = reading.tensor[start : start + each]
            if view is None:
                transfer = self._threads_of_pool().submit(self._read_to_device, slot, start, part, after)
            else:
                memory = view[start : start + round_up(part.numel())]
                transfer = self._threads_of_pool().submit(slot.read, start, part, memory)
            reading.transfers.append(transfer)
        return reading

    def _read_to_device(self, slot: Slot, start: int, into: torch.Tensor, after: Any) -> None:
        assert self._copies is not None
        landing = self._landings.get()  # waits until a buffer has been copied from
        try:
            values = torch.frombuffer(landing, dtype=torch.uint8, count=into.numel())
            slot.read(start, values, memoryview(landing)[: round_up(into.numel())])
            self._copies.to_device(into, values, after)
        finally:
            self._landings.put(landing)

    def drain(self) -> None:
        """Waits until all writes that :meth:`write` began are done.

        Raises:
            OSError: the disk failed.
            RuntimeError: values were changed while they were copied from the device.
        """
        failure: Exception | None = None
        while self._written:
            try:
                self._recycle(self._written.popleft())
            except (OSError, RuntimeError) as error:
                failure = error
        if failure is not None:
            raise failure

    def run(self, works: Iterable[Work]) -> None:
        """Does each of `works` in turn, in this thread. Other threads read what comes next and write what was done.

        Raises:
            OSError: the disk failed. All threads are at rest then.
        """
        if world().is_simulated:
            self._run_without_memory(works)
            return
        self.drain()
        reading: deque[_UnderWay] = deque()
        writing: deque[_UnderWay] = deque()
        most_read = self._count // 2 if self._count > 2 else 0
        try:
            for work in works:
                reading.append(self._start(work, writing))
                if len(reading) > most_read:
                    self._finish(reading.popleft(), writing)
            while reading:
                self._finish(reading.popleft(), writing)
            while writing:
                self._recycle(writing.popleft())
        except BaseException:
            for under_way in (*reading, *writing):
                for transfer in under_way.transfers:
                    transfer.cancel()
                    transfer.exception() if not transfer.cancelled() else None
                self._buffers.append(under_way.buffer)
            raise

    def _run_without_memory(self, works: Iterable[Work]) -> None:
        """Computes on fake tensors, and counts what would be moved."""
        for _, of_one_kind in groupby(works, lambda work: object() if work.kind is None else work.kind):
            row = list(of_one_kind)
            for work in row:
                for move in work.moves:
                    move.slot.moved += move.buffer_bytes * (move.read + move.write)
            for turn in loop_slices([slice(i, i + 1) for i in range(len(row))]):
                [work] = row[turn]
                work.compute([torch.empty(move.numel, dtype=move.dtype) for move in work.moves])

    def _start(self, work: Work, writing: deque[_UnderWay]) -> _UnderWay:
        pool = self._threads_of_pool()
        if work.buffer_bytes > self._largest:
            raise ValueError(f"a work needs {work.buffer_bytes} bytes, and buffers have {self._largest}")
        started = _UnderWay(work, self._buffer(writing))
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
            elif move.zero:
                tensor.zero_()
        return started

    def _threads_of_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            begin = None if self._copies is None else self._copies.make_current
            self._pool = ThreadPoolExecutor(self._threads, "tensorshard-offload", begin)
        return self._pool

    def _buffer(self, writing: deque[_UnderWay]) -> mmap.mmap:
        if not self._buffers and self._made < self._count:
            self._made += 1
            return mmap.mmap(-1, self._largest)
        while not self._buffers:
            self._recycle(writing.popleft())
        return self._buffers.pop()

    def _recycle(self, written: _UnderWay) -> None:
        try:
            written.wait()
        finally:
            self._buffers.append(written.buffer)
        if written.work.written is not None:
            written.work.written()

    def _finish(self, started: _UnderWay, writing: deque[_UnderWay]) -> None:
        writing.append(started)  # so that it is waited for after a failure
        started.wait()
        started.work.compute(started.tensors)
        self._submit_writes(started)

    def _submit_writes(self, started: _UnderWay) -> None:
        assert self._pool is not None
        for move, tensor, memory in zip(started.work.moves, started.tensors, started.memories, strict=True):
            if move.write:
                move.slot.moved += move.buffer_bytes
                started.transfers.append(self._pool.submit(move.slot.write, move.start, tensor, memory))
