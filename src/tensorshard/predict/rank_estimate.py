"""What one rank's step takes: the peak of its ledger, what that is made of, and how it changes over the step.

Also here: torch's caching allocator for CUDA, as far as it decides how much memory is reserved.

The rules are those of torch's documentation. Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from
segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger ones from segments of their own, in steps of
2 MiB. An allocation takes the smallest free block that fits; what is left over becomes a free block, and free
neighbours are merged. Segments are never released. There is only one stream.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tensorshard.plan.storage import Storage
from tensorshard.predict.operation_ledger import Operations, Traffic
from tensorshard.predict.storage_ledger import Allocation, Event, StorageLedger

PARAMETERS = "parameters"
GATHERED = "gathered parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
ACTIVATIONS = "activations"
INPUTS = "inputs"
TEMPORARIES = "temporaries"
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS, TEMPORARIES)
_BY_PHASE = {"initialization": PARAMETERS, "forward": ACTIVATIONS, "backward": TEMPORARIES, "update": TEMPORARIES}
_LARGEST = 8
_MOMENTS = 320

# What the process of a CPU rank takes beside live tensors: Python's objects, small tensors in the heap, messages under
# way, page tables. Small GPTs took up to 28 MiB, and up to 5% of their live tensors.
_BESIDE = 32 << 20
_BESIDE_SHARE = 1 / 32
_ROUND = 512
_SMALL = 1 << 20  # the largest request for small segments; also, a large block is split if more than this is left
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
_MOST_OF_LARGE = 10 << 20
_STEP = 2 << 20


@dataclass(frozen=True)
class Moment:
    """What is held at one moment.

    Args:
        phase: "initialization", "forward", "backward" or "update".
        held: bytes by category, in the order in which categories were given.
    """

    phase: str
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.held)


@dataclass(frozen=True)
class LargeTensor:
    """A tensor that is held at the peak, or several that are alike.

    Args:
        nbytes: bytes of each.
        line: the line of the user's code that made it, such as "gpt.py:71"; "" if other code made it.
        count: how many such tensors there are.
    """

    nbytes: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    phase: str
    operation: str
    line: str = ""
    count: int = 1


@dataclass(frozen=True)
class RankEstimate:
    """One rank's memory.

    Args:
        rank: its number. stage: its pipeline stage; 0 without a pipeline.
        peak_allocated: the largest number of bytes in live tensors at once, over the steps that were run.
        peak_reserved: bytes that torch's caching allocator on a CUDA device would reserve for them. Not validated. On
            CPU ranks: these bytes, and a margin for what the process takes beside its tensors.
        peak_device: `peak_reserved`, and the bytes that a process takes on the device in addition.
        by_category: bytes at the peak, by what they are for: "parameters", "gathered parameters", "gradients",
            "optimizer states", "activations", "inputs" and "temporaries"; they add up to `peak_allocated`.
        phase: what was going on at the peak: "initialization", "forward", "backward" or "update".
        largest: the largest tensors at the peak.
        timeline: the phase and the bytes in live tensors after each allocation and each free of the steps.
        history: the same by category, at a few hundred moments.
        operations: the kernels and transfers of a step.
        host_bytes, disk_bytes: what the plan's offload keeps in the host's memory, buffers included, and on disk.
        host_traffic, disk_traffic: bytes that a step reads from there and writes to there.
        on_host: whether it is a CPU rank, whose device is the host.
    """

    rank: int
    stage: int
    peak_allocated: int
    peak_reserved: int
    peak_device: int
    by_category: dict[str, int]
    phase: str
    largest: list[LargeTensor]
    timeline: list[tuple[str, int]] = field(repr=False)
    history: list[Moment] = field(repr=False, default_factory=list)
    operations: Operations = field(default_factory=Operations, repr=False)
    host_bytes: int = 0
    disk_bytes: int = 0
    host_traffic: int = 0
    disk_traffic: int = 0
    on_host: bool = False

    @property
    def peak_measured(self) -> int:
        """Bytes at the peak as the rank's process measures them, beyond what it held before: live tensors, and on a CPU
        what such a process takes beside them."""
        return self.peak_reserved if self.on_host else self.peak_allocated

    @property
    def flops(self) -> int:
        """Floating-point operations of a step: matrix products, convolutions and attention, recomputation included."""
        return self.operations.flops

    @property
    def memory_traffic(self) -> int:
        """Bytes that the kernels of a step read and write."""
        return self.operations.memory_traffic

    @property
    def traffic(self) -> dict[str, dict[str, Traffic]]:
        """What each collective moves along each axis of the mesh in a step."""
        return self.operations.traffic()


def summarize(
    ledger: StorageLedger,
    known: Mapping[int, str],
    *,
    rank: int,
    stage: int,
    device_bytes: int,
    operations: Operations | None = None,
    storage: Storage,
    on_host: bool = False,
) -> RankEstimate:
    """The memory of a rank, from what `ledger` has noted.

    Args:
        known: the categories of storages whose use is known, by their numbers.
        device_bytes: bytes that the device holds in addition to tensors.
        operations: the operations of a step; None if they were not counted.
        storage: what is offloaded, and what the last step has moved.
        on_host: whether it is a CPU rank, which has no caching allocator.
    """
    categories = [_category(a, known) for a in ledger.allocations]
    peak, at = _peak(ledger.events, ledger.start)
    live = _live(ledger.events[: at + 1])
    by_category = dict.fromkeys(CATEGORIES, 0)
    for number, nbytes in live.items():
        by_category[categories[number]] += nbytes
    steady = [*_at_once(_live(ledger.events[: ledger.start])), *ledger.events[ledger.start :]]
    reserved = resident(peak) if on_host else _reserved(steady)
    return RankEstimate(
        rank,
        stage,
        peak,
        reserved,
        reserved + device_bytes,
        by_category,
        ledger.events[at].phase if ledger.events else "initialization",
        _largest(ledger, live, categories),
        _timeline(steady),
        moments(steady, categories, CATEGORIES),
        operations or Operations(),
        storage.held("host memory"),
        storage.held("disk"),
        storage.moved("host memory"),
        storage.moved("disk"),
        on_host=on_host,
    )


def resident(live: int) -> int:
    """Bytes that the process of a CPU rank takes for `live` bytes of tensors and beside them."""
    return live + int(live * _BESIDE_SHARE) + _BESIDE


def _category(allocation: Allocation, known: Mapping[int, str]) -> str:
    return GATHERED if allocation.resized else known.get(allocation.number) or _BY_PHASE[allocation.phase]


def _largest(ledger: StorageLedger, live: Mapping[int, int], categories: Sequence[str]) -> list[LargeTensor]:
    """The tensors that take the most at the peak. Equal tensors, such as those of a model's blocks, are one entry."""
    counts = Counter(_described(ledger.allocations[number], live[number], categories[number]) for number in live)
    alike = [replace(tensor, count=count) for tensor, count in counts.items()]
    return sorted(alike, key=lambda tensor: tensor.nbytes * tensor.count, reverse=True)[:_LARGEST]


def _described(allocation: Allocation, nbytes: int, category: str) -> LargeTensor:
    dtype = str(allocation.dtype).removeprefix("torch.")
    return LargeTensor(
        nbytes, category, allocation.shape, dtype, allocation.phase, allocation.operation, allocation.line
    )


def _peak(events: Sequence[Event], start: int) -> tuple[int, int]:
    """The most bytes that were live at once from event `start` on, and after which event."""
    live = sum(event.nbytes for event in events[:start])
    most, at = live, start - 1
    for index, event in enumerate(events[start:], start=start):
        live += event.nbytes
        if live > most:
            most, at = live, index
    return most, at


def _at_once(live: Mapping[int, int]) -> list[Event]:
    """Storages that are there before the first step, as if allocated at once. What was freed before is left out, since
    the search for a table of tensor parallelism runs on the host."""
    return [Event(number, nbytes, "initialization") for number, nbytes in live.items()]


def _live(events: Sequence[Event]) -> dict[int, int]:
    live: dict[int, int] = {}
    for event in events:
        live[event.number] = live.get(event.number, 0) + event.nbytes
    return {number: nbytes for number, nbytes in live.items() if nbytes}


def _reserved(events: Sequence[Event]) -> int:
    allocator = CachingAllocator()
    blocks: dict[int, Any] = {}
    for event in events:
        block = blocks.pop(event.number, None)
        if block is not None:  # a storage that grows gets a new block, too
            allocator.free(block)
        if event.nbytes > 0:
            blocks[event.number] = allocator.allocate(event.nbytes)
    return allocator.reserved


def _timeline(events: Sequence[Event]) -> list[tuple[str, int]]:
    live, line = 0, []
    for event in events:
        live += event.nbytes
        line.append((event.phase, live))
    return line


def moments(events: Sequence[Event], category_of: Sequence[str], categories: Iterable[str]) -> list[Moment]:
    """Cuts `events` into about 300 stretches, and at the ends of phases, and returns the fullest moment of each.

    Args:
        category_of: the category of each storage, by its number.
        categories: all categories.
    """
    place = {name: index for index, name in enumerate(categories)}
    totals = [0] * len(place)
    length = max(1, len(events) // _MOMENTS)
    fullest: list[Moment] = []
    in_stretch = length
    for event in events:
        totals[place[category_of[event.number]]] += event.nbytes
        moment = Moment(event.phase, tuple(totals))
        if fullest and fullest[-1].phase == event.phase == "initialization":
            fullest[-1] = moment  # of the initialization only its end counts: what is there when the steps begin
        elif in_stretch >= length or fullest[-1].phase != event.phase:
            fullest.append(moment)
            in_stretch = 0
        elif moment.total > fullest[-1].total:
            fullest[-1] = moment
        in_stretch += 1
    return fullest


def _segment(size: int) -> int:
    """Bytes of the segment that is reserved for a block of `size`."""
    if size <= _SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < _MOST_OF_LARGE else -(-size // _STEP) * _STEP


@dataclass(eq=False)
class _Block:
    size: int
    small: bool
    number: int  # among free blocks of one size, the one that was made first is taken
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class CachingAllocator:
    """Takes requests for memory and requests to free it.

    Attributes:
        reserved: bytes of all segments so far.
    """

    reserved: int = 0
    _numbers: Iterator[int] = field(default_factory=count)
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})

    def allocate(self, nbytes: int) -> _Block:
        """A block of at least `nbytes`, to be given back to :meth:`free`."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        blocks = self._free[small]
        place = bisect_left(blocks, (size, -1), key=lambda entry: entry[:2])
        if place < len(blocks):
            block = blocks.pop(place)[2]
        else:
            segment = _segment(size)
            self.reserved += segment
            block = _Block(segment, small, next(self._numbers))
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            other = _Block(rest, small, next(self._numbers), before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        block.free = False
        return block

    def free(self, block: _Block) -> None:
        """Takes `block` back."""
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._free[block.small].remove((neighbour.size, neighbour.number, neighbour))
        if block.after is not None and block.after.free:
            block.size += block.after.size
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        if block.before is not None and block.before.free:
            first = block.before
            first.size += block.size
            first.after = block.after
            if block.after is not None:
                block.after.before = first
            block = first
        self._keep(block)

    def _keep(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.number, block), key=lambda entry: entry[:2])
