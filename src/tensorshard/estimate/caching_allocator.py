"""CUDA's caching allocator of torch, as far as it decides how much memory is reserved.

Its rules are those of torch's documented allocator: sizes are rounded to 512 bytes; up to 1 MiB come from segments of
2 MiB, below 10 MiB from segments of 20 MiB, and larger ones from segments of their own in steps of 2 MiB; a block is
the smallest that fits, what is left of it is a block again, and free neighbours become one. Segments are kept. There is
one stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

_ROUND = 512
_SMALL = 1 << 20  # the largest request that is served from small segments, and the least rest that splits a large block
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MOST_OF_LARGE = 10 << 20
_STEP = 2 << 20


def _segment(size: int) -> int:
    """Bytes of the segment that is reserved for a block of `size`."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _MOST_OF_LARGE else -(-size // _STEP) * _STEP


@dataclass(eq=False)
class _Block:
    size: int
    small: bool
    number: int  # of those of one size, the one that was made first is taken
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class CachingAllocator:
    """Replays allocations.

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
