"""Finds how many classes a head can have on a group of GPUs, by training one rank's part of it: the side that asks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.jobs import run_job
from benchmarks.heads import HeadWork

_RANK_MODULE = "benchmarks.harness.heads_fit_rank"
_STEPS = 64  # of the search: what is found is at most a 64th of what the states alone would allow below the limit


@dataclass(frozen=True)
class FitJob:
    """What is to be found out.

    Args:
        work: with so few classes that it fits anyhow.
        builder: a module in :mod:`benchmarks.peers`, and its `options`.
        ranks: that hold the classes; the first of them, which never holds fewer than another, is trained alone.
        budgets: bytes of a rank's memory, for each of which the classes are sought.
    """

    work: HeadWork
    builder: str
    options: dict[str, Any]
    ranks: int
    budgets: list[int]


@dataclass(frozen=True)
class Fit:
    """What was found.

    Args:
        bytes_per_class: of the states, as the small head held them.
        classes: of all ranks, the most that were trained within each budget.
    """

    bytes_per_class: float
    classes: list[int]


def measure_fit(job: FitJob, *, environment: Mapping[str, str], timeout: float) -> Fit:
    """Trains the first rank's part of heads of several sizes.

    Raises:
        RankError: it failed, or took too long.
    """
    return Fit(**run_job(_RANK_MODULE, job, 1, environment=environment, timeout=timeout)[0])


def most_that_fit(fits: Callable[[int], bool], limit: int) -> int:
    """The largest of 64 equally spaced numbers below `limit` for which `fits`; 0 if it does for none."""
    low, high = 0, _STEPS  # low is known to fit, high not to
    while high - low > 1:
        middle = (low + high) // 2
        if fits(limit * middle // _STEPS):
            low = middle
        else:
            high = middle
    return limit * low // _STEPS
