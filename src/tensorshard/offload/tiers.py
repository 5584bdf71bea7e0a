"""Where an offloaded tensor is kept: in host memory, or in a scratch file."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import dtensor_like, to_local
from tensorshard.comm.world import world
from tensorshard.offload.device_copies import DeviceCopies
from tensorshard.offload.scratch_file import BLOCK, ScratchFile, round_up
from tensorshard.plan.offload import Offload
from tensorshard.plan.storage import MasterPlace, TemporaryCopy

_LEAST_ON_DISK = 1 << 16  # bytes; smaller tensors are not worth a request of their own

_HOST, _DISK = "host memory", "disk"

TILE_ALIGNMENT = BLOCK
"""Tiles begin at multiples of this many elements: whole blocks of any dtype, and whole vectors of any processor."""


@dataclass(frozen=True)
class SlotSpec:
    """A tensor that will be kept in host memory or on disk.

    Args:
        kind: what it is, for messages: "parameters", "optimizer states", "master weights", "gradients" or
            "activations".
        numel: elements of this rank's shard.
        dtype: of its elements.
    """

    kind: str
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return round_up(self.numel * self.dtype.itemsize)


class Slot(ABC):
    """One offloaded tensor, flat.

    Attributes:
        tensor: all of it, [numel], for code that reads or writes it between steps.
        moved: bytes that steps have read from and written to it.
    """

    tensor: torch.Tensor
    moved: int = 0

    @abstractmethod
    def read(self, start: int, into: torch.Tensor, memory: memoryview) -> None:
        """Copies the elements from `start` on, as many as `into` has.

        Args:
            start: a multiple of :data:`TILE_ALIGNMENT`.
            into: the beginning of `memory`.
            memory: whole blocks.
        """

    @abstractmethod
    def write(self, start: int, values: torch.Tensor, memory: memoryview) -> None:
        """Copies `values`, the beginning of `memory`, to the elements from `start` on."""


class HostSlot(Slot):
    """A tensor in host memory."""

    def __init__(self, spec: SlotSpec) -> None:
        self.tensor = torch.zeros(spec.numel, dtype=spec.dtype)

    def read(self, start: int, into: torch.Tensor, memory: memoryview) -> None:
        into.copy_(self.tensor[start : start + into.numel()])

    def write(self, start: int, values: torch.Tensor, memory: memoryview) -> None:
        self.tensor[start : start + values.numel()].copy_(values)


class CountedSlot(Slot):
    """A slot without memory, for a plan that is tried on fake tensors. It counts what would be moved."""

    def read(self, start: int, into: torch.Tensor, memory: memoryview) -> None:
        raise RuntimeError("a slot without memory cannot be read")

    def write(self, start: int, values: torch.Tensor, memory: memoryview) -> None:
        raise RuntimeError("a slot without memory cannot be written")


class FakeSlot(CountedSlot):
    """A slot whose tensor is fake."""

    def __init__(self, spec: SlotSpec) -> None:
        self.tensor = torch.zeros(spec.numel, dtype=spec.dtype)


class DiskSlot(Slot):
    """A tensor in a scratch file.

    Args:
        reserved: where the space begins that was reserved for it and other tensors.
        offset: where in that space it begins, in bytes.
    """

    def __init__(self, spec: SlotSpec, file: ScratchFile, reserved: int, offset: int) -> None:
        self.tensor = file.tensor(reserved, offset, spec.numel, spec.dtype)
        self._file = file
        self._offset = reserved + offset
        self._itemsize = spec.dtype.itemsize

    def read(self, start: int, into: torch.Tensor, memory: memoryview) -> None:
        self._file.read(memory, self._offset + start * self._itemsize)

    def write(self, start: int, values: torch.Tensor, memory: memoryview) -> None:
        self._file.write(memory, self._offset + start * self._itemsize)


class DeviceSlot(Slot):
    """A tensor in the memory of a device that is not the host. Its tiles are read and written as those of other slots.

    Args:
        tensor: flat.
        after: an event of :meth:`.DeviceCopies.given` that its copies follow; set before they begin.
    """

    def __init__(self, tensor: torch.Tensor, copies: DeviceCopies, after: Any = None) -> None:
        self.tensor = tensor
        self.after = after
        self._copies = copies

    def read(self, start: int, into: torch.Tensor, memory: memoryview) -> None:
        self._copies.to_host(into, self.tensor[start : start + into.numel()], self.after).wait()

    def write(self, start: int, values: torch.Tensor, memory: memoryview) -> None:
        self._copies.to_device(self.tensor[start : start + values.numel()], values, self.after)


@dataclass(frozen=True)
class OffloadedMaster(MasterPlace):
    """The places of a master weight.

    Args:
        slot: of this rank's shard.
        copy: the same shard of the parameter that forward computes with, flat, which the update writes in place; None
            if forward reads the master weight itself.
        device_copy: in place of `copy`, if that shard is in the memory of a device that is not the host.
    """

    slot: Slot
    copy: torch.Tensor | None = None
    device_copy: DeviceSlot | None = None

    @property
    def holds_gradients(self) -> bool:
        return self.device_copy is None


class Tiers:
    """Makes the slots of one rank: in host memory as long as its budget lasts, then in one scratch file.

    Under a ``FakeTensorMode`` they are counted in the same way, and take no memory.

    Args:
        offload: what goes where.
        ranks_here: how many ranks share the host's memory.
        copies: copies between the device and the host; None if the device is the host.

    Attributes:
        failure: an error in reading parameters that the other ranks do not know yet; None for none.
        fake: whether it was made under a ``FakeTensorMode``.

    Raises:
        ValueError: the folder cannot hold a scratch file, see :class:`.ScratchFile`; `host_memory` is less than
            the buffers of this machine's ranks.
    """

    def __init__(self, offload: Offload, ranks_here: int = 1, copies: DeviceCopies | None = None) -> None:
        self.offload = offload
        self.copies = copies
        self.failure: OSError | None = None
        self._file: ScratchFile | None = None
        self._left: int | None = None  # bytes of the budget
        self._held: dict[tuple[str, str], int] = {}
        self._made: list[tuple[str, Slot]] = []  # with the place of each
        self._on_device: list[DeviceSlot] = []  # those of weights that come back to the device
        self.fake = world().is_simulated
        if offload.host_bytes is not None:
            self._left = offload.host_bytes // ranks_here - offload.buffer_bytes
            if self._left < 0:
                raise ValueError(
                    f"offload.host_memory={offload.host_memory!r} is less than the buffers of this machine's "
                    f"{ranks_here} ranks, {offload.buffer_memory} each; set host_memory to at least "
                    f"{ranks_here * offload.buffer_bytes} bytes, or make buffer_memory smaller"
                )
        if offload.uses_disk and not self.fake:
            self._file = ScratchFile(offload.folder)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all slots."""
        return [slot.tensor for _, slot in self._made]

    def held(self, where: str) -> int:
        """Bytes that this rank keeps in "host memory" (including its buffers), or on "disk"."""
        buffers = self.offload.buffer_bytes if where == _HOST else 0
        return buffers + sum(size for (_, place), size in self._held.items() if place == where)

    def moved(self, where: str) -> int:
        """Bytes that steps have read from and written to slots in "host memory" or on "disk".

        Weights that come back to the device count as "host memory".
        """
        back = sum(slot.moved for slot in self._on_device) if where == _HOST else 0
        return back + sum(slot.moved for place, slot in self._made if place == where)

    def forget_moved(self) -> None:
        """Makes :meth:`moved` count from zero again."""
        for slot in (*self._on_device, *(slot for _, slot in self._made)):
            slot.moved = 0

    def add(self, tier: str, specs: Sequence[SlotSpec]) -> list[Slot]:
        """A slot for each of `specs`, filled with zeros: on disk if `tier` says so, or if the budget of host memory is
        used up.

        Raises:
            ValueError: the disk has no space for them.
        """
        in_memory = [tier == "cpu" and self.reserve(spec.nbytes) for spec in specs]
        on_disk = [spec for spec, here in zip(specs, in_memory, strict=True) if not here]
        reserved = offset = 0
        if on_disk and not self.fake:
            assert self._file is not None
            reserved = self._file.reserve(sum(spec.nbytes for spec in on_disk))
        made: list[Slot] = []
        for spec, here in zip(specs, in_memory, strict=True):
            self._count(spec, _HOST if here else _DISK)
            made.append(self._slot(spec, here, reserved, offset))
            offset += 0 if here else spec.nbytes
            self._made.append((_HOST if here else _DISK, made[-1]))
        return made

    def _slot(self, spec: SlotSpec, in_memory: bool, reserved: int, offset: int) -> Slot:
        if self.fake:
            return FakeSlot(spec)
        if in_memory:
            return HostSlot(spec)
        assert self._file is not None
        return DiskSlot(spec, self._file, reserved, offset)

    def keep(self, values: torch.Tensor, copy: torch.Tensor) -> OffloadedMaster:
        """Moves the master weights `values` to a slot.

        Args:
            copy: the weights that forward computes with, flat.

        Raises:
            ValueError: the disk has no space for them.
        """
        spec = SlotSpec("master weights", values.numel(), values.dtype)
        [slot] = self.add(self.offload.optimizer or "cpu", [spec])
        slot.tensor.copy_(values.reshape(-1))
        if self.copies is None:
            return OffloadedMaster(slot, copy)
        self._on_device.append(DeviceSlot(copy, self.copies))
        return OffloadedMaster(slot, device_copy=self._on_device[-1])

    def take_failure(self) -> OSError | None:
        """Returns :attr:`failure`, and forgets it."""
        failure, self.failure = self.failure, None
        return failure

    def sync_mapping(self) -> None:
        """Called before transfers, in case :attr:`Slot.tensor` was read or written since the last ones."""
        if self._file is not None:
            self._file.sync_mapping()

    @property
    def held_by_kind(self) -> dict[tuple[str, str], int]:
        """Bytes of each kind in "host memory" or on "disk" of this rank; of activations, the most at a time."""
        return dict(self._held)

    def describe(self) -> str:
        """A table of what is held where on this rank, a line for each kind and tier."""
        lines = [f"{kind:<16} {where:<11} {held / 2**20:>12,.1f} MiB" for (kind, where), held in self._held.items()]
        lines.append(f"{'buffers':<16} {'host memory':<11} {self.offload.buffer_bytes / 2**20:>12,.1f} MiB")
        return "\n".join(lines)

    def reserve(self, nbytes: int) -> bool:
        """Takes so many bytes from the budget of host memory, if it has them; returns whether it has. Below 0 gives
        back."""
        if self._left is None:
            return True
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def note(self, kind: str, where: str, nbytes: int) -> None:
        """Notes for the table that `nbytes` of a `kind` are held at a time, if that is more than before."""
        self._held[kind, where] = max(nbytes, self._held.get((kind, where), 0))

    def _count(self, spec: SlotSpec, where: str) -> None:
        place = spec.kind, where
        self._held[place] = self._held.get(place, 0) + spec.nbytes


class CopyOnDisk(TemporaryCopy):
    """Memory for a second copy of tensors in a scratch file, which is gone with them."""

    def __init__(self, folder: Path) -> None:
        self._file = ScratchFile(folder)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or tensor.dtype
        numel = to_local(tensor).numel()
        if numel * dtype.itemsize < _LEAST_ON_DISK or tensor.device.type != "cpu":
            return super().like(tensor, dtype)
        reserved = self._file.reserve(numel * dtype.itemsize)
        return laid_out_like(tensor, self._file.tensor(reserved, 0, numel, dtype))


def laid_out_like(master: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of `master`, whose shard on this rank is `flat`: a DTensor if `master` is one."""
    local = flat.view(to_local(master).shape)
    return dtensor_like(local, master) if isinstance(master, DTensor) else local
