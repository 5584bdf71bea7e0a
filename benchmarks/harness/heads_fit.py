"""Finds how many classes a head can have on a group of GPUs by training one rank's part: the side that starts it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.jobs import run_job
from benchmarks.heads import HeadWork

_RANK_MODULE = "benchmarks.harness.heads_fit_rank"
_STEPS = 64  # of the search; its result is at most a 64th of what the states would allow below the limit


@dataclass(frozen=True)
class FitJob:
    """What to find out.

    Args:
        work: with so few classes that it certainly fits.
        builder: a module in :mod:`benchmarks.peers`, with its `options`.
        ranks: number of ranks that hold the classes. Only the first is trained; none holds more than it does.
        budgets: bytes of a rank's memory. The number of classes is found for each.
    """

    work: HeadWork
    builder: str
    options: dict[str, Any]
    ranks: int
    budgets: list[int]


@dataclass(frozen=True)
class Fit:
    """The result.

    Args:
        bytes_per_class: bytes of the states per class, measured with the small head.
        classes: for each budget, the most classes, on all ranks, that could be trained.
    """

    bytes_per_class: float
    classes: list[int]


def measure_fit(job: FitJob, *, environment: Mapping[str, str], timeout: float) -> Fit:
    """Trains the first rank's part of heads of several sizes.

    Raises:
        RankError: the rank failed, or took too long.
    """
    return Fit(**run_job(_RANK_MODULE, job, 1, environment=environment, timeout=timeout)[0])


def most_that_fit(fits: Callable[[int], bool], limit: int) -> int:
    """The largest of 64 equally spaced numbers below `limit` that fits; 0 if none does."""
    low, high = 0, _STEPS  # low is known to fit, high not to
    while high - low > 1:
        middle = (low + high) // 2
        if fits(limit * middle // _STEPS):
            low = middle
        else:
            high = middle
    return limit * low // _STEPS
