"""Space for activations: host memory as long as its budget lasts, then a scratch file that grows."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from tensorshard.offload.scratch_file import ScratchFile, round_up
from tensorshard.offload.tiers import CountedSlot, HostSlot, Slot, SlotSpec, Tiers

_KIND = "activations"
_GROWTH = 1 << 24  # bytes by which the file grows at least

_LOST = "The step was not taken, and weights are as before it; save a checkpoint and go on from that"


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
