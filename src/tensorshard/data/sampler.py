"""The order of the data: a function of (seed, epoch, index), never of the number of ranks.

Also here: the samples of one batch, dealt so that ranks finish together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

_HALVINGS = 40  # of the interval in which the least time of the slowest rank is


class ShardedBatchSampler(Sampler[list[int]]):
    """Batches of sample indices for one data rank; to be given to ``DataLoader(batch_sampler=...)``.

    The data is one stream: the order of epoch 0, then that of epoch 1, and so on, each a new permutation of
    all samples. Global batch ``k`` is the positions ``[k * B, (k + 1) * B)`` of that stream, and each data
    rank takes its contiguous share of them. So the ranks together see the same samples in the same order,
    whatever their number. ``samples_consumed`` alone says where a run stands, even if it continues on another
    number of ranks or with another batch size.

    By default the stream never ends, and a batch may hold the end of one epoch and the start of the next;
    nothing is dropped. With ``num_epochs`` it ends after that many epochs, and ``drop_last`` decides about the
    samples that are left over.

    Iterating does not change ``samples_consumed``, since a loader reads ahead of training. The caller counts the
    samples that were trained on (steps done times ``global_batch_size``), and passes that number to the sampler of
    a resumed run.

    Args:
        num_samples: length of the dataset.
        global_batch_size: samples in one batch, over all data ranks.
        dp_rank: this process's index among the data ranks.
        dp_size: number of data ranks; divides ``global_batch_size``.
        seed: of the order; the same on every rank.
        shuffle: whether to permute each epoch, else the dataset's own order.
        num_epochs: how often to go through the data; None for an endless stream.
        drop_last: whether to leave out the last, incomplete batch of a stream that ends. If it is kept, it
            is split as evenly as possible; a rest too small to give every rank a sample is joined to the
            batch before it, unless there may be empty shares.
        empty_shares: whether such a rest is a batch of its own. The last ranks then get an empty list for it,
            of which torch's ``DataLoader`` makes no batch; :meth:`tensorshard.Engine.loader` does.
        samples_consumed: samples of the stream, counted over all ranks and epochs, to skip.
        order: gives the order of an epoch, in place of that of `seed`, such as ``TorchOrder``.
        deal: which samples of a batch each data rank gets, from its indices: places of them for each rank. None for
            contiguous shares.

    Raises:
        ValueError: sizes that do not fit together; the message names ones that do.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = None,
        drop_last: bool = True,
        samples_consumed: int = 0,
        empty_shares: bool = False,
        order: Callable[[int], np.ndarray] | None = None,
        deal: Callable[[list[int]], list[list[int]]] | None = None,
    ) -> None:
        _check_sizes(num_samples, global_batch_size, dp_rank, dp_size)
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more.")
        if samples_consumed < 0:
            raise ValueError(f"samples_consumed is {samples_consumed}; expected 0 or more.")
        if num_epochs is None and not drop_last:
            raise ValueError("An endless stream has no last batch to keep: with drop_last=False, give num_epochs.")
        if num_epochs is not None and num_epochs < 1:
            raise ValueError(f"num_epochs is {num_epochs}; expected at least 1, or None for an endless stream.")
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = shuffle
        self.num_epochs = num_epochs
        self.drop_last = drop_last
        self.samples_consumed = samples_consumed
        self._order = order
        self._deal = deal
        self._smallest = 1 if empty_shares else dp_size  # of the batches

        remaining = self._remaining()
        if remaining is not None and not drop_last and 0 < remaining < self._smallest:
            raise ValueError(
                f"{remaining} samples are left for {dp_size} data ranks, which is less than one each: "
                f"use at most {remaining} data ranks, or drop_last=True."
            )

    def __iter__(self) -> Iterator[list[int]]:
        start = self.samples_consumed
        for size in self.global_sizes():
            if self._deal is not None:
                indices = self._indices(start, start + size)
                yield [indices[place] for place in self._deal(indices)[self.dp_rank]]
            else:
                first = start + sum(shares(size, self.dp_size)[: self.dp_rank])
                yield self._indices(first, first + shares(size, self.dp_size)[self.dp_rank])
            start += size

    def all_shares(self) -> Iterator[tuple[int, ...]]:
        """How many samples of each batch to come each data rank gets."""
        start = self.samples_consumed
        for size in self.global_sizes():
            if self._deal is not None:
                yield tuple(map(len, self._deal(self._indices(start, start + size))))
            else:
                yield shares(size, self.dp_size)
            start += size

    def __len__(self) -> int:
        """Number of batches left; a TypeError for an endless stream."""
        remaining = self._remaining()
        if remaining is None:
            raise TypeError("An endless stream of batches has no length; give num_epochs for one that ends.")
        full, rest = divmod(remaining, self.global_batch_size)
        return full + (not self.drop_last and rest >= self._smallest)

    def _remaining(self) -> int | None:
        if self.num_epochs is None:
            return None
        return max(0, self.num_epochs * self.num_samples - self.samples_consumed)

    def global_sizes(self) -> Iterator[int]:
        """Sizes of the batches to come, over all data ranks."""
        remaining = self._remaining()
        while remaining is None:
            yield self.global_batch_size
        while remaining >= self.global_batch_size:
            rest = remaining - self.global_batch_size
            joined = rest if not self.drop_last and rest < self._smallest else 0
            yield self.global_batch_size + joined
            remaining = rest - joined
        if remaining and not self.drop_last:
            yield remaining

    def _indices(self, first: int, last: int) -> list[int]:
        """Sample indices at the positions ``[first, last)`` of the stream."""
        if first == last:
            return []
        epochs, positions = np.divmod(np.arange(first, last, dtype=np.int64), self.num_samples)
        if self.shuffle:
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
                here = epochs == epoch
                if self._order is not None:
                    positions[here] = self._order(epoch)[positions[here]]
                else:
                    positions[here] = permute(positions[here], self.num_samples, seed=self.seed, epoch=epoch)
        return positions.tolist()


def shares(size: int, dp_size: int) -> tuple[int, ...]:
    """How many of a batch's `size` samples each data rank gets, as evenly as possible."""
    return tuple(size // dp_size + (rank < size % dp_size) for rank in range(dp_size))


class TorchOrder:
    """The order of ``DataLoader(dataset, shuffle=True, generator=generator)``, whose passes are complete.

    Args:
        dataset: with a length.
        generator: in the state before the first pass; it is not changed.
    """

    def __init__(self, dataset: Any, generator: torch.Generator) -> None:
        self._samples = range(len(dataset))
        self._start = generator.clone_state()
        self._generator = generator.clone_state()
        self._epoch = -1
        self._indices = np.empty(0, dtype=np.int64)

    def __call__(self, epoch: int) -> np.ndarray:
        """The index of each sample of an epoch. Epochs that were not asked for are drawn, too."""
        if epoch < self._epoch:
            self._generator, self._epoch = self._start.clone_state(), -1
        while self._epoch < epoch:
            # One batch of all samples. The type of a range is no Dataset, but it has what a DataLoader needs.
            samples: Any = self._samples
            epochs: DataLoader[Any] = DataLoader(
                samples, len(samples), shuffle=True, generator=self._generator, collate_fn=np.array
            )
            (self._indices,) = epochs
            self._epoch += 1
        return self._indices


def _check_sizes(num_samples: int, global_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; expected at least 1.")
    if dp_size < 1:
        raise ValueError(f"dp_size is {dp_size}; expected at least 1.")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank is {dp_rank}; expected 0 to {dp_size - 1} with dp_size {dp_size}.")
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size is {global_batch_size}; expected a multiple of dp_size {dp_size}.")
    check_divides(f"global_batch_size {global_batch_size}", global_batch_size, dp_size)


def check_divides(given: str, size: int, dp_size: int) -> None:
    """Raises a ValueError, which begins with what was `given`, unless all data ranks get as many of `size` samples."""
    if rest := size % dp_size:
        above = size - rest + dp_size
        nearest = f"{above - dp_size} or {above}" if above > dp_size else str(above)
        raise ValueError(f"{given} does not divide over {dp_size} data ranks; the nearest that does is {nearest}.")


_ROUNDS = 8


def permute(positions: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of ``range(size)`` sends each of ``positions``.

    A Feistel network permutes the smallest ``[0, 4**k)`` that holds ``size`` values; a value that lands
    outside ``[0, size)`` is sent through again until it lands inside ("cycle walking"), which keeps the map
    one-to-one: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. At most four
    passes are expected for each value, and nothing of length ``size`` is ever made.

    Args:
        positions: integers in ``[0, size)``, of any shape.
        size: number of elements of the permutation.
        seed: non-negative; with ``epoch``, the key of the permutation.
        epoch: non-negative.

    Returns:
        int64 array of the shape of ``positions``.

    Raises:
        ValueError: a position outside ``[0, size)``.
    """
    values = np.array(positions, dtype=np.int64)
    if values.size and not 0 <= values.min() <= values.max() < size:
        raise ValueError(f"positions run from {values.min()} to {values.max()}; expected 0 to {size - 1}.")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)

    walking = np.ones(values.shape, dtype=bool)
    while walking.any():
        values[walking] = _feistel(values[walking].astype(np.uint64), half_bits, keys).astype(np.int64)
        walking &= values >= size
    return values


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """A balanced Feistel network on ``2 * half_bits`` bits, one round a key."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << shift) | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): each input bit stirs every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Balance:
    """Deals samples by their lengths. Which samples a batch has does not change.

    Args:
        padded: whether a rank's samples are filled up to its longest one, so that it takes as long as its number of
            samples times that length; else as long as its lengths together.
        least: samples of each rank, if there are enough.
    """

    padded: bool = False
    least: int = 1

    def deal(self, lengths: Sequence[float] | np.ndarray, ranks: int) -> list[list[int]]:
        """Which samples each rank gets: places in `lengths`, in their order. All ranks compute the same.

        Without padding it is the longest-processing-time rule (R. L. Graham, "Bounds on multiprocessing timing
        anomalies", 1969). With padding the longest samples are together, and the more the shorter they are: of such
        deals the one with the least time of the slowest rank.
        """
        least = min(self.least, len(lengths) // ranks)
        longest_first = np.argsort(-np.asarray(lengths, dtype=np.float64), kind="stable")
        deal = _in_a_row if self.padded and least else _to_the_least_loaded
        return [sorted(part) for part in deal(longest_first.tolist(), lengths, ranks, least)]

    def idle_share(self, lengths: Sequence[float] | np.ndarray, shares: Sequence[Sequence[int]]) -> float:
        """The share of all ranks' time in which they wait for the slowest one.

        Args:
            lengths: of a batch's samples.
            shares: as :meth:`deal` returns them, or any others.
        """
        times = [_padded(part, lengths) if self.padded else sum(lengths[place] for place in part) for part in shares]
        return float(1 - np.mean(times) / max(times))


def _padded(part: Sequence[int], lengths: Sequence[float] | np.ndarray) -> float:
    return len(part) * max((lengths[place] for place in part), default=0)


def _to_the_least_loaded(
    places: list[int], lengths: Sequence[float] | np.ndarray, ranks: int, least: int
) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # a heap
    missing = least * ranks
    for done, place in enumerate(places):
        load, count, rank = heappop(loads)
        while missing >= len(places) - done and count >= least:
            load, count, rank = heappop(loads)  # the rest is for ranks that have too few
        missing -= count < least
        parts[rank].append(place)
        heappush(loads, (load + float(lengths[place]), count + 1, rank))
    return parts


def _in_a_row(places: list[int], lengths: Sequence[float] | np.ndarray, ranks: int, least: int) -> list[list[int]]:
    def within(time: float) -> list[list[int]] | None:
        """Parts that take no longer than `time`; None if there are none."""
        parts, first = [], 0
        for rank in range(ranks):
            most = len(places) - first - least * (ranks - rank - 1)
            longest = max(float(lengths[places[first]]), 1e-12)
            size = max(least, min(most, int(time / longest + 1e-9)))
            if size * longest > time * (1 + 1e-9):
                return None
            parts.append(places[first : first + size])
            first += size
        return parts if first == len(places) else None

    low, high = 0.0, len(places) * max(float(lengths[places[0]]), 1e-12)  # all samples on one rank
    best = within(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        parts = within(middle)
        if parts is None:
            low = middle
        else:
            best, high = parts, middle
    assert best is not None
    return best
