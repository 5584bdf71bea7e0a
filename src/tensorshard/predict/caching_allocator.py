"""torch's caching allocator for CUDA, as far as it decides how much memory is reserved.

The rules are those of torch's documentation. Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from
segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger ones from segments of their own, in steps of
2 MiB. An allocation takes the smallest free block that fits; what is left over becomes a free block, and free
neighbours are merged. Segments are never released. There is only one stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

_ROUND = 512
_SMALL = 1 << 20  # the largest request for small segments; also, a large block is split if more than this is left
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
_MOST_OF_LARGE = 10 << 20
_STEP = 2 << 20


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
