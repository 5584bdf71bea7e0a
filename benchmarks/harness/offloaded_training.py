"""Training with a limit on memory: the side that starts the ranks, and the measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.jobs import run_job
from benchmarks.harness.memory_group import limited_memory
from benchmarks.harness.ranks import RankError
from benchmarks.offloads import OffloadWork

_RANK_MODULE = "benchmarks.harness.offloaded_training_rank"


@dataclass(frozen=True)
class OffloadJob:
    """What each rank runs.

    Args:
        builder: a module in :mod:`benchmarks.peers`, with its `options`.
        folder: for scratch files.
        steps: number of steps that are measured, after one that is not.
    """

    work: OffloadWork
    builder: str
    options: dict[str, Any]
    folder: str
    steps: int


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of one rank, with a number for each step.

    Args:
        compute_seconds: processor time divided by the number of threads. It covers all computing and copying, also the
            kernel's work for the disk.
        read_bytes, written_bytes: from and to disks, as the system counts them.
        on_disk: bytes of each kind that are kept on disk.
        raw_bytes_per_second: speed of the disk for this rank, reading and writing at once, before the training.
    """

    step_seconds: list[float]
    compute_seconds: float
    read_bytes: float
    written_bytes: float
    raw_bytes_per_second: float
    peak_bytes: int
    losses: list[float]
    on_disk: dict[str, int]


@dataclass(frozen=True)
class OffloadMeasurement:
    """The measurements of all ranks of one run together.

    Args:
        peak_bytes: of the memory of all ranks, page cache included.
        limited: whether the limit was enforced.
        bound_ratio: the time of a step over the longer of two times: computing alone, and reading and writing alone.
        on_disk: bytes of each kind, on all ranks.
        raw_share: the bytes that the run moved in a second, over those that the disk can move.
    """

    step_seconds: float
    peak_bytes: int
    limited: bool
    read_per_parameter: float
    written_per_parameter: float
    raw_share: float
    bound_ratio: float
    loss: float
    on_disk: dict[str, int]


class KilledError(RuntimeError):
    """A rank was killed because there was not enough memory."""


def measure_offloaded(
    job: OffloadJob, world_size: int, *, environment: Mapping[str, str], timeout: float
) -> OffloadMeasurement:
    """Runs `job` on `world_size` fresh ranks, within the work's memory.

    Raises:
        KilledError: there was not enough memory.
        RankError: a rank failed or took more than `timeout` seconds.
    """
    try:
        with limited_memory(job.work.memory_bytes) as (variables, use):
            measurements = run_job(
                _RANK_MODULE, job, world_size, environment={**environment, **variables}, timeout=timeout
            )
    except RankError as error:
        if use.killed:
            raise KilledError("killed: memory did not suffice") from error
        raise
    ranks = [RankMeasurement(**rank) for rank in measurements]
    peak = use.peak_bytes + (0 if use.limited else sum(rank.peak_bytes for rank in ranks))
    return summarize(ranks, job.work.parameters, peak_bytes=peak, limited=use.limited)


def summarize(ranks: list[RankMeasurement], parameters: int, *, peak_bytes: int, limited: bool) -> OffloadMeasurement:
    """One measurement of a run from those of its ranks."""
    seconds = median(max(step) for step in zip(*(rank.step_seconds for rank in ranks), strict=True))
    moved = sum(rank.read_bytes + rank.written_bytes for rank in ranks)
    raw = sum(rank.raw_bytes_per_second for rank in ranks)  # all ranks measured at once
    bound = max(moved / raw, *(rank.compute_seconds for rank in ranks), 1e-9)
    return OffloadMeasurement(
        step_seconds=seconds,
        peak_bytes=peak_bytes,
        limited=limited,
        read_per_parameter=sum(rank.read_bytes for rank in ranks) / parameters,
        written_per_parameter=sum(rank.written_bytes for rank in ranks) / parameters,
        raw_share=moved / seconds / raw,
        bound_ratio=seconds / bound,
        loss=sum(rank.losses[-1] for rank in ranks) / len(ranks),
        on_disk={kind: sum(rank.on_disk.get(kind, 0) for rank in ranks) for kind in ranks[0].on_disk},
    )
