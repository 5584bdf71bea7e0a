"""Which positions of a sequence each rank holds: any partition, kept as runs of neighbouring positions."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


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
        self._indices: dict[int, slice | torch.Tensor] = {}

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

    def index(self, rank: int) -> "slice | torch.Tensor":
        """What takes this rank's positions of a whole dimension: a slice if they are one run."""
        if rank not in self._indices:
            self._indices[rank] = as_index(self.runs[rank])
        return self._indices[rank]


class SequenceLayout(PositionLists):
    """Which rank holds which positions of one dimension. Every position has exactly one owner.

    Attributes:
        length: of the whole dimension.
        factors: (outer, layout, inner) if the dimension is a flattened [outer, sequence, inner].
        is_home: whether a sequence has this layout by choice, and not for a while only (:func:`elsewhere`).
        origin: the layout of the sequence of which this is a share (:func:`shares`).
    """

    def __init__(
        self,
        runs: Sequence[Array],
        factors: "tuple[int, SequenceLayout, int] | None" = None,
        is_home: bool = True,
        origin: "SequenceLayout | None" = None,
    ) -> None:
        super().__init__(runs)
        self.length = sum(self.sizes)
        self.factors = factors
        self.is_home = is_home
        self.origin = origin
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


def as_index(runs: Array) -> "slice | torch.Tensor":
    """A slice for at most one run, else a tensor of positions."""
    if len(runs) <= 1:
        return slice(int(runs[0, 0]), int(runs[0, 1])) if len(runs) else slice(0, 0)
    return torch.from_numpy(np.concatenate([np.arange(start, stop) for start, stop in runs]))


def _merged(runs: Array) -> Array:
    runs = runs[runs[:, 1] > runs[:, 0]]
    if len(runs) < 2:
        return runs
    first = np.concatenate([[True], runs[1:, 0] != runs[:-1, 1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([runs[first, 0], runs[last, 1]], 1)
