"""Offloads what blocks keep for backward. It is written during their forward, and read ahead of their backward.

``torch.autograd.graph.saved_tensors_hooks`` are called with each tensor that a block keeps. Its storage is moved as it
is, so that sizes, strides, offsets and bits are kept; a storage of which several views are kept is moved once. The copy
is made when the tensor is kept, so later in-place changes do not reach it.

The memory of a kept tensor is freed when forward no longer refers to it. The tensor that replaces it in backward is
freed when the last operation that needs it has run.

Also here: space for activations: host memory as long as its budget lasts, then a scratch file that grows.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.world import world
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.offload.scratch_file import ScratchFile, round_up
from tensorshard.offload.tiers import CountedSlot, HostSlot, Slot, SlotSpec, Tiers
from tensorshard.offload.transfers import Reading, Transfers
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.modules import own_buffers, own_parameters
from tensorshard.torch_private.tensors import StorageWeakRef, storage_address, tensor_version

_KIND = "activations"
_GROWTH = 1 << 24  # bytes by which the file grows at least

_LOST = "The step was not taken, and weights are as before it; save a checkpoint and go on from that"
SMALLEST = 1 << 16
"""The smallest storage that is moved, in bytes. Smaller ones stay on the device, since a request would cost more."""

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_REQUESTS = 8  # writes under way at once, which share the buffer for writing
# Operations that make a view or a cast of one tensor.
_VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    )
)


class ActivationSlot(Slot):
    """Bytes of a scratch file, which are only read and written in the background."""

    def __init__(self, file: ScratchFile, start: int, nbytes: int) -> None:
        self._file = file
        self.start = start
        self.nbytes = nbytes

    def read(self, start: int, into: torch.Tensor, memory: memoryview) -> None:
        self._file.read(memory, self.start + start)

    def write(self, start: int, values: torch.Tensor, memory: memoryview) -> None:
        self._file.write(memory, self.start + start)


class _ActivationsPlace(CountedSlot):
    """Stands for a place of activations in an estimate.

    Args:
        on_disk: whether the place would be a file.
    """

    def __init__(self, on_disk: bool) -> None:
        self.on_disk = on_disk


class ActivationSpace:
    """Hands out slots for bytes, and takes them back.

    The first forward shows how much is needed, and the file keeps that size. Optimizer states have a file of their own,
    since its page cache is dropped before every update.

    Args:
        tiers: activations use its budget of host memory and its folder, and appear in its table.

    Raises:
        ValueError: the folder cannot hold a scratch file, see :func:`.scratch_file.open_unnamed`.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tier = tiers.offload.activations
        self._file: ScratchFile | None = None
        if tiers.offload.uses_disk and not tiers.fake:
            self._file = ScratchFile(tiers.offload.folder, _LOST)
        self._free: list[tuple[int, int]] = []  # (start, bytes) of the file, in order, never adjacent
        # Slots that are no longer needed, with the writes that must end before they can be used again. Garbage
        # collection may call give_back at any time, in any thread. So give_back only appends to this.
        self._returned: deque[tuple[Slot, int, Sequence[Future[None]]]] = deque()
        self._lent = {"host memory": 0, "disk": 0}
        self._moved = {"host memory": 0, "disk": 0}

    @property
    def lent_bytes(self) -> int:
        """Bytes of the slots that were not given back."""
        self._collect()
        return sum(self._lent.values())

    def moved(self, where: str) -> int:
        """Bytes that were read from and written to slots in "host memory" or on "disk", of slots that were given
        back."""
        self._collect()
        return self._moved[where]

    def forget_moved(self) -> None:
        """Makes :meth:`moved` count from zero again."""
        self._collect()
        self._moved = dict.fromkeys(self._moved, 0)

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes`.

        Raises:
            ValueError: the disk is full.
        """
        self._collect()
        size = round_up(nbytes)
        in_memory = self._tier == "cpu" and self._tiers.reserve(size)
        where = "host memory" if in_memory else "disk"
        slot: Slot
        if self._tiers.fake:
            slot = _ActivationsPlace(on_disk=not in_memory)
        elif in_memory:
            slot = HostSlot(SlotSpec(_KIND, nbytes, torch.uint8))
        else:
            slot = self._take_of_file(size)
        self._lent[where] += size
        self._tiers.note(_KIND, where, self._lent[where])
        return slot

    def give_back(self, slot: Slot, nbytes: int, writes: Sequence[Future[None]]) -> None:
        """Ends the use of a slot of `nbytes`, to which `writes` may still be under way."""
        self._returned.append((slot, round_up(nbytes), writes))

    def _collect(self) -> None:
        for _ in range(len(self._returned)):
            slot, size, writes = self._returned.popleft()
            if not all(write.done() for write in writes):
                self._returned.append((slot, size, writes))
                continue
            on_disk = isinstance(slot, ActivationSlot) or (isinstance(slot, _ActivationsPlace) and slot.on_disk)
            where = "disk" if on_disk else "host memory"
            self._lent[where] -= size
            self._moved[where] += slot.moved
            if isinstance(slot, ActivationSlot):
                self._put_back(slot.start, slot.nbytes)
            elif not on_disk:
                self._tiers.reserve(-size)

    def _take_of_file(self, size: int) -> ActivationSlot:
        assert self._file is not None
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(start + size, free - size)] if free > size else []
                return ActivationSlot(self._file, start, size)
        grown = max(size, _GROWTH)
        try:
            start = self._file.reserve(grown, mapped=False)
        except ValueError:
            if grown == size:
                raise
            grown = size
            start = self._file.reserve(grown, mapped=False)
        self._put_back(start, grown)
        return self._take_of_file(size)

    def _put_back(self, start: int, size: int) -> None:
        index = bisect_left(self._free, (start, size))
        if index < len(self._free) and self._free[index][0] == start + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            before, length = self._free.pop(index - 1)
            start, size = before, length + size
        insort(self._free, (start, size))


class BlockCall:
    """One call of a block in forward.

    Args:
        previous: the call before it, whose backward comes after this one's.
    """

    def __init__(self, block: int, previous: "BlockCall | None") -> None:
        self.block = block
        self.previous = None if previous is None else ref(previous)
        self.records: list[ReferenceType[_Record]] = []
        self.in_backward = False

    def unread(self) -> Iterator["_Record"]:
        """Its storages that backward still has to read. The one that was kept last comes first."""
        for reference in reversed(self.records):
            record = reference()
            if record is not None and record.is_unread:
                yield record


class _Record:
    """One storage that was moved. Its slot is given back when nothing needs it any more."""

    def __init__(self, call: BlockCall, space: ActivationSpace, slot: Slot, nbytes: int) -> None:
        self.call = call
        self.slot = slot
        self.nbytes = nbytes
        self.writes: Sequence[Future[None]] = ()
        self.saved: WeakSet[_Moved] = WeakSet()
        self.reading: Reading | None = None
        self.bytes: torch.Tensor | None = None  # all of it, while it is in the device's memory
        self.stays = False
        self._space = space

    @property
    def is_unread(self) -> bool:
        return self.bytes is None and self.reading is None and not any(saved.used for saved in self.saved)

    @property
    def is_written(self) -> bool:
        return all(write.done() for write in self.writes)

    def __del__(self) -> None:
        self._space.give_back(self.slot, self.nbytes, self.writes)


@dataclass(frozen=True, eq=False)
class _Stays:
    """A tensor that stays on the device, as autograd holds it."""

    call: BlockCall
    tensor: torch.Tensor
    version: int
    laid_out: Callable[[torch.Tensor], torch.Tensor] | None

    def restore(self) -> torch.Tensor:
        if tensor_version(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that is needed for the gradient was changed in place "
                f"after a block had kept it: it is at version {tensor_version(self.tensor)}, and version "
                f"{self.version} is needed; change a clone of it"
            )
        return self.tensor if self.laid_out is None else self.laid_out(self.tensor)


@dataclass(eq=False)
class _Moved:
    """A view of a storage that was moved."""

    call: BlockCall
    record: _Record
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    laid_out: Callable[[torch.Tensor], torch.Tensor] | None  # makes a DTensor, or a part of a sequence, of it
    used: bool = False

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        tensor = on_bytes(memory, self.dtype, self.size, self.stride, self.offset)
        if self.conjugate:
            tensor = tensor.conj()
        return tensor if self.laid_out is None else self.laid_out(tensor)


class OffloadedActivations:
    """Moves what blocks keep for backward, on one rank.

    A block whose backward always follows its own forward at once, such as a model's last block, keeps its tensors on
    the device: they would be read before they are written.

    Args:
        tiers: what goes where. Half of its ``buffer_memory`` is for activations; all of it, if no states are offloaded.
            Half of that is for writing, and half for reading ahead.

    Raises:
        ValueError: the folder cannot hold a scratch file.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.space = ActivationSpace(tiers)
        share = tiers.offload.activation_buffer_bytes // 2
        self._ahead_bytes = share
        self._transfers = Transfers(share, share // _REQUESTS, _REQUESTS, copies=tiers.copies, reads=True)
        self._device = torch.device("cpu") if tiers.copies is None else tiers.copies.device
        self._modules: dict[int, list[nn.Module]] = {}  # of each block
        self._moved: dict[int, tuple[StorageWeakRef, int, ReferenceType[_Record]]] = {}  # by the storage's address
        self._ahead: WeakSet[_Record] = WeakSet()  # records that were read ahead, or are being read ahead
        self._direct: dict[int, bool] = {}  # of each block: whether its backward always follows its forward at once
        self._latest: ReferenceType[BlockCall] | None = None  # the last call in forward
        self._failure: Exception | None = None

    # -- forward --

    def surround(self, block: nn.Module) -> None:
        """Moves what each forward of `block` keeps for backward; with recomputation, its inputs."""
        wrap_forward(block, Role.OFFLOADED_ACTIVATIONS, partial(self.forward, block))

    def forward(self, block: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``forward(*args, **kwargs)``, and moves what it keeps for backward."""
        if not torch.is_grad_enabled() or is_in_backward():  # recomputation needs the tensors at once
            return forward(*args, **kwargs)
        with self._hooks(block):
            return forward(*args, **kwargs)

    @contextmanager
    def _hooks(self, block: nn.Module) -> Iterator[None]:
        latest = None if self._latest is None else self._latest()
        if latest is not None and not latest.in_backward:
            self._direct[latest.block] = False
        call = BlockCall(id(block), latest)
        self._latest = ref(call)
        self._moved = {address: known for address, known in self._moved.items() if not known[0].expired()}
        if call.block not in self._modules:
            self._modules[call.block] = list(block.modules())
        stays = self._direct.get(call.block, False)

        def pack(tensor: torch.Tensor) -> Any:
            with torch.no_grad():
                return self._stay(call, tensor) if stays else self._keep(call, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._restore):
            yield

    def _keep(self, call: BlockCall, tensor: torch.Tensor) -> _Moved | _Stays:
        local, laid_out = _taken_apart(tensor)
        if (
            type(local) not in (torch.Tensor, nn.Parameter, FakeTensor)
            or local.layout != torch.strided
            or local.is_neg()
        ):
            return self._stay(call, tensor)
        storage = local.untyped_storage()
        address = storage_address(storage)
        if storage.nbytes() < SMALLEST or _is_of_parameter(tensor) or self._belongs_to_block(call.block, address):
            return self._stay(call, tensor)
        record = self._record(call, local, storage, address)
        if record is None:
            return self._stay(call, tensor)
        offset = int(local.storage_offset())
        moved = _Moved(call, record, local.dtype, local.shape, local.stride(), offset, local.is_conj(), laid_out)
        record.saved.add(moved)
        return moved

    def _stay(self, call: BlockCall, tensor: torch.Tensor) -> _Stays:
        local, laid_out = _taken_apart(tensor)
        return _Stays(call, local.detach(), tensor_version(local), laid_out)  # it would hold the graph that holds it

    def _belongs_to_block(self, block: int, address: int) -> bool:
        # Looked up each time: ZeRO 3 replaces shards by gathered parameters.
        return any(
            type(tensor) is not DTensor and storage_address(tensor.untyped_storage()) == address
            for module in self._modules[block]
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
        )

    def _record(
        self, call: BlockCall, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int
    ) -> _Record | None:
        """The record of `storage`, as it is now; None if it has to stay."""
        version = tensor_version(tensor)
        known = self._moved.get(address)
        if known is not None and not known[0].expired() and known[1] == version:
            record = known[2]()
            if record is not None:
                if record.call is not call:  # shared between blocks
                    record.stays = True
                    record.bytes = bytes_of(tensor)
                return record
        if self._failure is not None:
            return None
        try:
            slot = self.space.take(storage.nbytes())
            record = _Record(call, self.space, slot, storage.nbytes())
            record.writes = self._transfers.write(slot, bytes_of(tensor), owner=tensor.detach())
        except (OSError, ValueError) as error:
            self._failure = error  # all ranks learn of it before the update; an exception here would leave them waiting
            return None
        call.records.append(ref(record))
        self._moved[address] = StorageWeakRef(storage), version, ref(record)
        return record

    # -- backward --

    def _restore(self, kept: _Moved | _Stays) -> torch.Tensor:
        call = kept.call
        if not call.in_backward:
            call.in_backward = True
            if self._latest is not None and self._latest() is call:
                self._direct.setdefault(call.block, True)
        with torch.no_grad():
            if isinstance(kept, _Stays):
                self._read_ahead(call)
                return kept.restore()
            record = kept.record
            self._ahead.discard(record)
            memory = self._load(record) if record.bytes is None else record.bytes
            kept.used = True
            tensor = kept.view(memory)
            if not record.stays:
                # Held until each of its views was read once.
                record.bytes = None if all(saved.used for saved in record.saved) else memory
            self._read_ahead(call)
            return tensor

    def _load(self, record: _Record) -> torch.Tensor:
        reading, record.reading = record.reading, None
        try:
            if reading is None:
                for write in record.writes:
                    write.result()
                reading = self._transfers.read(record.slot, record.nbytes)
            return reading.wait()
        except (OSError, RuntimeError) as error:
            self._failure = self._failure or error
            return torch.zeros(record.nbytes, dtype=torch.uint8, device=self._device)

    def _read_ahead(self, call: BlockCall | None) -> None:
        """Begins to read what backward needs next: the storages of this call, then of earlier calls."""
        room = self._ahead_bytes - sum(record.nbytes for record in self._ahead)
        while call is not None:
            for record in call.unread():
                if not record.is_written or (record.nbytes > room and self._ahead):
                    return  # at least one is read ahead, however large it is
                record.reading = self._transfers.read(record.slot, record.nbytes)
                self._ahead.add(record)
                room -= record.nbytes
            call = None if call.previous is None else call.previous()

    # -- failures --

    def take_failure(self) -> Exception | None:
        """The error since the last call of this method, if any. After an error, the gradients are not valid."""
        try:
            self._transfers.drain()
        except (OSError, RuntimeError) as error:
            self._failure = self._failure or error
        failure, self._failure = self._failure, None
        return failure


def _taken_apart(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """What this rank has of `tensor`, and what makes such a tensor of it; None for a plain one."""
    if type(tensor) is DTensor:
        return tensor.to_local(), partial(
            DTensor.from_local,
            device_mesh=tensor.device_mesh,
            placements=tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if hasattr(type(tensor), "taken_apart"):
        return tensor.taken_apart()  # type: ignore[attr-defined, no-any-return]
    return tensor, None


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter, or a view or a cast of one."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage of `tensor`, [bytes] of uint8, in the same memory."""
    storage = tensor.untyped_storage()
    if not world().is_simulated:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
    count = storage.nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)


def on_bytes(
    memory: torch.Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor in the `memory` that :func:`bytes_of` gave, or in other bytes.

    Args:
        offset: of its first element, in elements.
    """
    if not world().is_simulated:
        tensor = torch.empty(0, dtype=dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), offset, size, stride)  # type: ignore[call-overload]
    whole = memory.numel() // dtype.itemsize * dtype.itemsize
    return memory[:whole].view(dtype).as_strided(size, stride, offset)
