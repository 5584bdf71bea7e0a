"""Layouts of sequences, and what becomes of a layout when the dimension is sliced, joined, flattened or split.

Also here: which positions of a sequence each rank holds: any partition, kept as runs of neighbouring positions.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tensorshard.comm.sharding import shard_sizes
from tensorshard.torch_private.fake_tensors import active_fake_mode

Array = np.ndarray[Any, Any]
_CACHED = 512


class Places:
    """Places along a dimension that are no slice, with a tensor on each device that has asked: a copy to a GPU waits.

    Args:
        places: in order.
    """

    def __init__(self, places: Array) -> None:
        self._places = np.ascontiguousarray(places)
        self._tensors: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._places)

    def on(self, device: torch.device) -> torch.Tensor:
        """The places as a tensor on `device`. It is not to be written."""
        made = self._tensors.get(device)
        if made is None:
            with torch.inference_mode(False):  # or no later backward could keep it
                made = torch.from_numpy(self._places).to(device)
            if active_fake_mode() is None:
                self._tensors[device] = made
        return made


Index = slice | Places


class PositionLists:
    """For each rank, a list of positions. Ranks may list the same position.

    Attributes:
        runs: for each rank an array [runs, 2] of starts and ends; a run is as long as possible.
        sizes: how many positions each rank lists.
        key: equal for equal lists.
    """

    def __init__(self, runs: Sequence[Array]) -> None:
        self.runs = tuple(_merged(np.asarray(run, np.int64).reshape(-1, 2)) for run in runs)
        self.sizes = [int((run[:, 1] - run[:, 0]).sum()) for run in self.runs]
        text = b"|".join(run.tobytes() for run in self.runs)
        self.key = text if len(text) < 256 else hashlib.blake2b(text, digest_size=32).digest()
        self._identity: Any = self.key
        self._positions: dict[int, Array] = {}
        self._places: dict[int, Places] = {}

    @classmethod
    def of_positions(cls, positions: Sequence[Array]) -> "PositionLists":
        """From one array of positions for each rank."""
        return cls([runs_of(each) for each in positions])

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PositionLists) and self._identity == other._identity)

    @property
    def ranks(self) -> int:
        return len(self.runs)

    def positions(self, rank: int) -> Array:
        """The positions of `rank`, in its order."""
        if rank not in self._positions:
            starts, lengths = self.runs[rank][:, 0], self.runs[rank][:, 1] - self.runs[rank][:, 0]
            before = np.repeat(np.cumsum(lengths) - lengths, lengths)
            self._positions[rank] = np.repeat(starts, lengths) + np.arange(self.sizes[rank]) - before
        return self._positions[rank]

    def places(self, rank: int) -> Places:
        """The positions of `rank` as tensors."""
        if rank not in self._places:
            self._places[rank] = Places(self.positions(rank))
        return self._places[rank]

    def index(self, rank: int) -> Index:
        """What takes this rank's positions of a whole dimension: a slice if they are one run."""
        runs = self.runs[rank]
        return as_index(runs) if len(runs) <= 1 else self.places(rank)


class SequenceLayout(PositionLists):
    """Which rank holds which positions of one dimension. Every position has exactly one owner.

    Attributes:
        length: of the whole dimension.
        factors: (outer, layout, inner) if the dimension is a flattened [outer, sequence, inner].
        is_home: whether a sequence has this layout by choice, and not for a while only (:func:`elsewhere`).
        origin: the layout of the sequence of which this is a share (:func:`shares`).
        of_origin: which of its positions those of this one are; None without an origin.
    """

    def __init__(
        self,
        runs: Sequence[Array],
        factors: "tuple[int, SequenceLayout, int] | None" = None,
        is_home: bool = True,
        origin: "SequenceLayout | None" = None,
        of_origin: Array | None = None,
    ) -> None:
        super().__init__(runs)
        self.length = sum(self.sizes)
        self.factors = factors
        self.is_home = is_home
        self.origin, self.of_origin = origin, of_origin
        root = factors and (factors[0], factors[1]._identity, factors[2])
        self._identity = (self.key, root, is_home, origin and origin._identity)

    @cached_property
    def owner(self) -> Array:
        """The rank that holds each position."""
        owner = np.full(self.length, -1, np.int64)
        for rank, runs in enumerate(self.runs):
            for start, stop in runs:
                owner[start:stop] = rank
        if (owner < 0).any():
            raise ValueError("a layout has to name each position of the sequence once")
        return owner

    @cached_property
    def place(self) -> Array:
        """Where its owner holds each position."""
        place = np.zeros(self.length, np.int64)
        for rank in range(self.ranks):
            place[self.positions(rank)] = np.arange(self.sizes[rank])
        return place

    @cached_property
    def is_ordered(self) -> bool:
        """Whether the ranks' parts, one after the other, are the sequence."""
        runs = np.concatenate(self.runs)
        return bool((runs[1:, 0] == runs[:-1, 1]).all())

    @cached_property
    def is_full_everywhere(self) -> bool:
        """Whether no rank is without positions."""
        return min(self.sizes) > 0

    @cached_property
    def root(self) -> "tuple[int, SequenceLayout, int]":
        return self.factors or (1, self, 1)


def runs_of(positions: Array) -> Array:
    """The runs [n, 2] that make up an array of positions."""
    positions = np.asarray(positions, np.int64)
    if not len(positions):
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = np.concatenate([positions[:1], positions[breaks + 1]])
    stops = np.concatenate([positions[breaks], positions[-1:]]) + 1
    return np.stack([starts, stops], 1)


def as_index(runs: Array) -> Index:
    """A slice for at most one run, else all positions."""
    if len(runs) <= 1:
        return slice(int(runs[0, 0]), int(runs[0, 1])) if len(runs) else slice(0, 0)
    return Places(np.concatenate([np.arange(start, stop) for start, stop in runs]))


def _merged(runs: Array) -> Array:
    runs = runs[runs[:, 1] > runs[:, 0]]
    if len(runs) < 2:
        return runs
    first = np.concatenate([[True], runs[1:, 0] != runs[:-1, 1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([runs[first, 0], runs[last, 1]], 1)


@lru_cache(_CACHED)
def contiguous(length: int, size: int) -> SequenceLayout:
    """Rank after rank, as evenly as possible."""
    bounds = [length * rank // size for rank in range(size + 1)]
    return SequenceLayout([np.array([[start, stop]]) for start, stop in pairwise(bounds)])


@lru_cache(_CACHED)
def zigzag(length: int, size: int) -> SequenceLayout:
    """Each rank holds one part from the front and its counterpart from the back. For causal attention, every rank then
    has equally much to compute."""
    bounds = [length * part // (2 * size) for part in range(2 * size + 1)]
    parts = [(bounds[part], bounds[part + 1]) for part in range(2 * size)]
    return SequenceLayout([np.array([parts[rank], parts[2 * size - 1 - rank]]) for rank in range(size)])


def from_positions(positions: Sequence[Array]) -> SequenceLayout:
    """A layout in which rank r holds ``positions[r]``, in that order."""
    return SequenceLayout([runs_of(each) for each in positions])


@lru_cache(_CACHED)
def elsewhere(length: int, size: int) -> SequenceLayout:
    """A contiguous layout of another dimension than the sequence, used for a while. Where it meets a sequence's own
    layout, that one prevails."""
    return SequenceLayout(contiguous(length, size).runs, is_home=False)


@lru_cache(_CACHED)
def at_rank(length: int, rank: int, size: int) -> SequenceLayout:
    """All positions on one rank."""
    return SequenceLayout([np.array([[0, length if each == rank else 0]]) for each in range(size)])


@lru_cache(_CACHED)
def shares(layout: SequenceLayout, parts: int) -> tuple[list[list[int]], list[SequenceLayout]]:
    """A sequence's positions, shared by several ranks that hold the same ones, as tensor-parallel ranks do.

    Each rank of the layout cuts what it holds into `parts`. The first part of each make up the first share, and so on;
    shares are as long as :func:`tensorshard.comm.sharding.shard_sizes` says.

    Returns:
        For each rank how many positions each of its parts has; and the layout of each share.
    """
    left = np.array(shard_sizes(layout.length, parts))
    sizes = []
    for held in layout.sizes:
        wanted = left * held / max(left.sum(), 1)
        counts = np.floor(wanted).astype(np.int64)
        for part in np.argsort(counts - wanted, kind="stable")[: held - counts.sum()]:
            counts[part] += 1
        left -= counts
        sizes.append(counts.tolist())
    ends = np.cumsum(sizes, 1)
    layouts = []
    for part in range(parts):
        held_by = [
            layout.positions(rank)[(end := ends[rank][part]) - sizes[rank][part] : end] for rank in range(layout.ranks)
        ]
        every = np.sort(np.concatenate(held_by))
        runs = [runs_of(np.searchsorted(every, each)) for each in held_by]
        layouts.append(SequenceLayout(runs, None, layout.is_home, layout, every))
    return sizes, layouts


@lru_cache(_CACHED)
def expanded(layout: SequenceLayout, outer: int, inner: int) -> SequenceLayout:
    """The layout of the dimension [outer, sequence, inner], flattened."""
    if outer == inner == 1:
        return layout
    starts = np.arange(outer)[:, None, None] * layout.length
    runs = [((starts + each[None]) * inner).reshape(-1, 2) for each in layout.runs]
    before, root, after = layout.root
    return SequenceLayout(runs, (outer * before, root, inner * after), layout.is_home)


@lru_cache(_CACHED)
def factored(layout: SequenceLayout, rows: int, columns: int) -> tuple[int, SequenceLayout] | None:
    """If the dimension is [rows, columns] of which each rank holds whole rows, or the same columns of every row: which
    of the two dimensions is split (0 or 1), and its layout."""
    owner = layout.owner.reshape(rows, columns)
    for dim, line in ((1, owner[0]), (0, owner[:, 0])):
        if (owner == (line[None] if dim else line[:, None])).all():
            positions = [np.flatnonzero(line == rank) for rank in range(layout.ranks)]
            return dim, SequenceLayout([runs_of(each) for each in positions], None, layout.is_home)
    return None


@lru_cache(_CACHED)
def narrowed(layout: SequenceLayout, start: int, stop: int, step: int = 1) -> tuple[SequenceLayout, PositionLists]:
    """The layout of positions ``start:stop:step``, each of which stays where it is; and which of its places each rank
    keeps."""
    runs, places = [], []
    for each in layout.runs:
        held = each[:, 1] - each[:, 0]
        begins = np.cumsum(held) - held
        lower, upper = np.maximum(each[:, 0], start), np.minimum(each[:, 1], stop)
        if step > 1:
            lower = start + -(-(lower - start) // step) * step
        kept = lower < upper
        lower, upper, at = lower[kept], upper[kept], (begins + lower.clip(min=0) - each[:, 0])[kept]
        if step == 1:
            runs.append(np.stack([lower, upper], 1) - start)
            places.append(np.stack([at, at + upper - lower], 1))
            continue
        counts = -(-(upper - lower) // step)
        first = (lower - start) // step
        runs.append(np.stack([first, first + counts], 1))
        within = [np.arange(begin, begin + count * step, step) for begin, count in zip(at, counts, strict=True)]
        places.append(runs_of(np.concatenate([*within, np.zeros(0, np.int64)])))
    return SequenceLayout(runs, None, layout.is_home), PositionLists(places)


def selected(layout: SequenceLayout, positions: Array) -> tuple[SequenceLayout, PositionLists]:
    """The layout of ``sequence[positions]``, where each stays at its owner; and which places each rank takes."""
    return _selected(layout, np.ascontiguousarray(positions, np.int64).tobytes())


@lru_cache(64)
def _selected(layout: SequenceLayout, raw: bytes) -> tuple[SequenceLayout, PositionLists]:
    positions = np.frombuffer(raw, np.int64)
    owner = layout.owner[positions]
    new = [np.flatnonzero(owner == rank) for rank in range(layout.ranks)]
    places = [layout.place[positions[each]] for each in new]
    return SequenceLayout([runs_of(each) for each in new], None, layout.is_home), PositionLists.of_positions(places)


@lru_cache(_CACHED)
def joined(layouts: tuple[SequenceLayout, ...]) -> SequenceLayout:
    """The layout of sequences one after the other."""
    starts = np.cumsum([0, *(layout.length for layout in layouts)])
    runs = [
        np.concatenate([layout.runs[rank] + start for layout, start in zip(layouts, starts, strict=False)])
        for rank in range(layouts[0].ranks)
    ]
    return SequenceLayout(runs, None, any(layout.is_home for layout in layouts))
