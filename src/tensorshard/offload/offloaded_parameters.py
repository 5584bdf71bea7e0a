"""Parameters in host memory or on disk: a unit's shards are read when it is gathered, those of the next one ahead of
time."""

import mmap
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import succeed_together
from tensorshard.host.process_settings import give_back_free_memory, map_tensors_from
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.offload.scratch_file import round_up
from tensorshard.offload.tiers import TILE_ALIGNMENT, OffloadedMaster, Slot, SlotSpec, Tiers
from tensorshard.plan.storage import MasterPlace, ParameterUnits, UpdateProgress
from tensorshard.torch_private.dtensor import shard_of

_THREADS = 8  # requests under way at once
# A unit's parameters and gradients are allocated and freed all the time, and a heap returns little to the system. A
# process that trained 24 small blocks held 1.9 GB in its second step, and 0.5 GB with such tensors outside of the heap.
_MAPPED_BYTES = 1 << 20
_REQUEST_BYTES = 4 << 20
_BUFFERS_KEPT = 2  # one for reading ahead, and one that is copied from


@dataclass(eq=False)
class ParameterUnit:
    """Parameters that are read together.

    Args:
        slots: of this rank's shards.
        masters: the master weights whose shards these are.
        dtypes: to which they are cast when they are read for a device with memory of its own.
    """

    slots: list[Slot]
    masters: Sequence[nn.Parameter] = ()
    dtypes: Sequence[torch.dtype] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer for all shards, each in whole blocks."""
        return sum(_nbytes(slot) for slot in self.slots)


class _Memory:
    """Bytes for a unit, aligned to pages; on fake tensors none.

    Attributes:
        mapped: the memory; None on fake tensors.
        bytes: all of it, [size].
    """

    def __init__(self, size: int, fake: bool) -> None:
        self.mapped = None if fake else mmap.mmap(-1, max(size, mmap.PAGESIZE))
        count = size if self.mapped is None else len(self.mapped)
        self.bytes = (
            torch.empty(count, dtype=torch.uint8)
            if self.mapped is None
            else torch.frombuffer(self.mapped, dtype=torch.uint8)
        )

    def __len__(self) -> int:
        return self.bytes.numel()


@dataclass
class _Buffer:
    """Room for a unit, and the reads into it."""

    unit: ParameterUnit
    memory: _Memory
    tensors: list[torch.Tensor] = field(default_factory=list)
    cast: list[torch.Tensor] = field(default_factory=list)  # the same, cast; empty if they are gathered as they are
    transfers: list[Future[None]] = field(default_factory=list)

    def wait(self) -> OSError | None:
        """Waits for all transfers; returns the error, if any."""
        failure = None
        for transfer in self.transfers:
            try:
                transfer.result()
            except OSError as error:
                failure = error
        self.transfers.clear()
        return failure


class OffloadedParameters(ParameterUnits):
    """Reads units of parameters into memory for as long as they are gathered.

    The first step shows the order of units in forward and in backward. While a unit computes, the next one is read. So
    two units are in memory, and no more.

    Args:
        tiers: where the parameters go.
    """

    def __init__(self, tiers: Tiers) -> None:
        if not tiers.fake:
            map_tensors_from(_MAPPED_BYTES)
        self._is_current: Callable[[Sequence[nn.Parameter]], bool] = lambda _: True  # no update of them is under way
        self._refused: Exception | None = None
        self._tiers = tiers
        self._pool: ThreadPoolExecutor | None = None
        self._free: list[_Memory] = []
        self._sizes: Counter[int] = Counter()  # how many units have a buffer of this size
        self._ahead: _Buffer | None = None
        self._previous: Hashable = None
        self._next: dict[Hashable, ParameterUnit] = {}

    def keep(self, shard: torch.Tensor) -> tuple[torch.Tensor, MasterPlace]:
        try:
            unit = self.add([shard.reshape(-1)])
        except (ValueError, OSError) as error:
            # Other ranks may wait for this rank's values of later parameters. These take no memory here.
            self._refused = self._refused or error
            return shard.new_zeros(1).expand(shard.shape), MasterPlace()
        [slot] = unit.slots
        return slot.tensor.view(shard.shape), OffloadedMaster(slot)

    def unit(
        self, masters: Sequence[nn.Parameter], places: Sequence[MasterPlace], dtypes: Sequence[torch.dtype]
    ) -> ParameterUnit:
        slots = [place.slot for place in places if isinstance(place, OffloadedMaster)]  # all, or the plan is refused
        unit = ParameterUnit(slots, masters, dtypes)
        self._sizes[self._size(unit)] += 1
        return unit

    def check_room(self, group: dist.ProcessGroup) -> None:
        succeed_together(self._check_not_refused, group, "parallelize")

    def _check_not_refused(self) -> None:
        if self._refused is not None:
            raise self._refused

    def watch_forwards(self, model: nn.Module) -> None:
        hook_root(model, RootRole.OFFLOADED_PARAMETERS, before=lambda *_: self.begin())

    def watch_updates(self, update: UpdateProgress) -> None:
        self._is_current = update.is_done

    def add(self, shards: Sequence[torch.Tensor]) -> ParameterUnit:
        """Makes a unit that holds the values of `shards`, which are flat. They may be freed once this returns.

        Raises:
            ValueError: there is no space for them.
            OSError: the disk failed.
        """
        tier = self._tiers.offload.parameters
        assert tier is not None
        specs = [SlotSpec("parameters", shard.numel(), shard.dtype) for shard in shards]
        unit = ParameterUnit(self._tiers.add(tier, specs))
        buffer = self._buffer(unit)
        for tensor, shard in zip(buffer.tensors, shards, strict=True):
            tensor.copy_(shard)
        self._submit(buffer, write=True)
        failure = buffer.wait()
        if failure is not None:
            raise failure
        return unit

    def begin(self) -> None:
        """Called before each forward. It also returns the memory that the last step freed to the system."""
        self.forget()
        self._tiers.sync_mapping()
        if not self._tiers.fake:
            give_back_free_memory()

    def forget(self) -> None:
        self._drop_ahead()
        self._previous = None

    @contextmanager
    def read(self, unit: ParameterUnit, phase: Hashable) -> Iterator[list[torch.Tensor]]:
        """Gives the values of `unit`, a tensor for each slot, until the context ends.

        If the disk fails they are zeros, and :attr:`.Tiers.failure` says so: an exception here would leave other ranks
        waiting.

        Args:
            phase: forward or backward, for example. Each phase has its own order of units.
        """
        buffer = self._take(unit)
        failure = buffer.wait()
        if failure is not None:
            self._tiers.failure = failure
            for tensor in (*buffer.tensors, *buffer.cast):
                tensor.zero_()
        try:
            shapes = [shard_of(master).shape for master in unit.masters] or [slot.tensor.shape for slot in unit.slots]
            yield [tensor.view(shape) for tensor, shape in zip(buffer.cast or buffer.tensors, shapes, strict=True)]
        finally:
            self._keep(buffer)
        if self._previous is not None:
            self._next[self._previous] = unit
        self._previous = unit, phase, torch.is_grad_enabled()
        ahead = self._next.get(self._previous)
        if ahead is not None and self._ahead is None and self._is_current(ahead.masters):
            self._ahead = self._buffer(ahead)
            self._submit(self._ahead, write=False)

    def _take(self, unit: ParameterUnit) -> _Buffer:
        """A buffer into which `unit` is being read."""
        ahead = self._ahead
        if ahead is not None and ahead.unit is unit:
            self._ahead = None
            return ahead
        self._drop_ahead()  # the model calls units in another order than last time
        buffer = self._buffer(unit)
        self._submit(buffer, write=False)
        return buffer

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()  # a failure shows when the unit is needed
            self._keep(ahead)

    def _buffer(self, unit: ParameterUnit) -> _Buffer:
        size = self._size(unit)
        memory = next((free for free in self._free if len(free) == size), None)
        if memory is None:
            memory = _Memory(size, self._tiers.fake)
        else:
            self._free.remove(memory)
        buffer = _Buffer(unit, memory)
        offset = 0
        for slot in unit.slots:
            own = memory.bytes[offset : offset + slot.tensor.nbytes]
            buffer.tensors.append(own.view(slot.tensor.dtype))
            offset += _nbytes(slot)
        if self._tiers.copies is None:
            return buffer
        for tensor, dtype in zip(buffer.tensors, unit.dtypes, strict=False):  # none for `add`
            if tensor.dtype == dtype:
                buffer.cast.append(tensor)
                continue
            count = tensor.numel() * dtype.itemsize
            buffer.cast.append(memory.bytes[offset : offset + count].view(dtype))
            offset += round_up(count)
        return buffer

    def _size(self, unit: ParameterUnit) -> int:
        """Bytes of a buffer for `unit`."""
        if self._tiers.copies is None or not unit.dtypes:
            return unit.nbytes
        pairs = zip(unit.slots, unit.dtypes, strict=True)
        cast = (round_up(s.tensor.numel() * dtype.itemsize) for s, dtype in pairs if s.tensor.dtype != dtype)
        return unit.nbytes + sum(cast)

    def _keep(self, buffer: _Buffer) -> None:
        """Keeps the memory for other units of the same size. If there are none, it is freed."""
        if self._sizes[len(buffer.memory)] > 1 and len(self._free) < _BUFFERS_KEPT:
            self._free.append(buffer.memory)

    def _submit(self, buffer: _Buffer, write: bool) -> None:
        """Submits the reads of a unit into `buffer`, or the writes from it, a few MiB at a time."""
        if buffer.memory.mapped is None:
            for slot in buffer.unit.slots:
                slot.moved += _nbytes(slot)
            return
        if self._pool is None:
            begin = None if self._tiers.copies is None else self._tiers.copies.make_current
            self._pool = ThreadPoolExecutor(_THREADS, "tensorshard-parameters", begin)
        view, offset = memoryview(buffer.memory.mapped), 0
        for index, (slot, tensor) in enumerate(zip(buffer.unit.slots, buffer.tensors, strict=True)):
            each = max(1, _REQUEST_BYTES // tensor.element_size() // TILE_ALIGNMENT) * TILE_ALIGNMENT
            for start in range(0, tensor.numel(), each):
                part = tensor[start : start + each]
                first = offset + start * tensor.element_size()
                memory = view[first : first + round_up(part.numel() * tensor.element_size())]
                slot.moved += len(memory)
                move = slot.write if write else slot.read
                if buffer.cast and not write and buffer.cast[index] is not tensor:
                    move = partial(_read_and_cast, slot, buffer.cast[index][start : start + each])
                buffer.transfers.append(self._pool.submit(move, start, part, memory))
            offset += _nbytes(slot)


def _read_and_cast(slot: Slot, cast: torch.Tensor, start: int, into: torch.Tensor, memory: memoryview) -> None:
    slot.read(start, into, memory)
    cast.copy_(into)


def _nbytes(slot: Slot) -> int:
    return round_up(slot.tensor.numel() * slot.tensor.element_size())
