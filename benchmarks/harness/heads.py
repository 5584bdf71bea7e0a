"""Measures contenders' steps of a head: the side that starts the ranks and reads the outcome.

Each contender has its own processes, since the states of several heads of a million classes do not fit in memory
together. They take turns by starting again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.contender import Contender
from benchmarks.harness.jobs import run_job
from benchmarks.heads import HeadWork

_RANK_MODULE = "benchmarks.harness.heads_rank"
OUT_OF_MEMORY = "out of memory"  # what a rank reports if a GPU has no more memory

# Large tensors are allocated by the system and returned to it at once, so the peak only counts what is in use.
_EXACT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


class OutOfMemoryError(RuntimeError):
    """A contender needs more memory than the GPU has."""


@dataclass(frozen=True)
class HeadJob:
    """What each rank runs.

    Args:
        builder: a module in :mod:`benchmarks.peers`, with its `options`.
        threads: number of threads of each rank.
        exact: whether the first step is compared with fp64, which takes longer than the step.
        warmup_steps: steps before anything is measured; at least one, which makes the states.
        measured_steps: steps after those.
    """

    work: HeadWork
    builder: str
    options: dict[str, Any]
    threads: int
    exact: bool
    warmup_steps: int
    measured_steps: int


@dataclass(frozen=True)
class HeadMeasurement:
    """The measurements of one contender in one turn.

    Args:
        step_seconds: median over the steps of the slowest rank's time.
        cpu_seconds: processor time per step, of all ranks together.
        peak_bytes: most memory during the steps, beyond the states held before them: resident memory of a process, or
            memory of tensors on a GPU. Of the rank that has the most.
        bytes_per_class: bytes of the states of all ranks, per class.
        error: the largest of three errors against fp64: the relative error of the loss, and the largest errors of the
            features' gradient and of the weight's update, relative to the largest element of each. 0 if not measured.
    """

    step_seconds: float
    cpu_seconds: float
    peak_bytes: float
    bytes_per_class: float
    error: float


def measure_head(job: HeadJob, world_size: int, *, environment: Mapping[str, str], timeout: float) -> HeadMeasurement:
    """Runs one contender once.

    Raises:
        RankError: a rank failed, or took too long.
        OutOfMemoryError: a rank on a GPU did not have enough of it.
    """
    environment = {**_EXACT_MEMORY, "OMP_NUM_THREADS": str(job.threads), **environment}
    ranks = run_job(_RANK_MODULE, job, world_size, environment=environment, timeout=timeout)
    if any(OUT_OF_MEMORY in rank for rank in ranks):
        raise OutOfMemoryError(f"{job.builder} ran out of the GPU's memory at {job.work.classes:,} classes")
    return HeadMeasurement(
        step_seconds=median(max(step) for step in zip(*(rank["step_seconds"] for rank in ranks), strict=True)),
        cpu_seconds=sum(rank["cpu_seconds"] for rank in ranks),
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
        bytes_per_class=sum(rank["state_bytes"] for rank in ranks) / job.work.classes,
        error=max(rank["error"] for rank in ranks),
    )


def job_of(contender: Contender, work: HeadWork, **options: Any) -> HeadJob:
    """The job of a contender."""
    return HeadJob(work, contender.builder, contender.options, **options)
