"""Measures contenders' steps of a head: the side that starts the ranks and reads the outcome.

Each contender has processes of its own, since the states of several heads of a million classes do not fit side by
side, and they take turns by starting anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.contender import Contender
from benchmarks.harness.jobs import run_job
from benchmarks.heads import HeadWork

_RANK_MODULE = "benchmarks.harness.heads_rank"
OUT_OF_MEMORY = "out of memory"  # what a rank hands in, where a GPU's is used up

# Large tensors come from the system and go back to it at once, so that the peak is that of what is held.
_EXACT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


class OutOfMemoryError(RuntimeError):
    """A contender needs more memory than the GPU has."""


@dataclass(frozen=True)
class HeadJob:
    """What each rank is to run.

    Args:
        builder: a module in :mod:`benchmarks.peers`, and its `options`.
        threads: of each rank.
        exact: whether the first step is compared with fp64, which takes longer than the step.
        warmup_steps: before anything is measured; at least one, which makes the states.
        measured_steps: after those.
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
    """What was measured of one contender in one turn.

    Args:
        step_seconds: median over the steps; of the slowest rank.
        cpu_seconds: processor time per step, of all ranks together.
        peak_bytes: most memory during the steps, above what was held before them: the states. Resident memory of a
            process, or of tensors on a GPU. Of the rank that has the most.
        bytes_per_class: of the states, of all ranks, per class.
        error: the largest of: relative error of the loss; largest error of the features' gradient, and of the weight's
            update, relative to the largest element of each. Against fp64. 0 if it was not asked for.
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
