"""The samples of one batch, dealt so that ranks finish together."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

_HALVINGS = 40  # of the interval in which the least time of the slowest rank is


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
        found = within(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None
    return best
