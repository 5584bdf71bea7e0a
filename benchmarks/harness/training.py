"""Measures one contender's training on new ranks: the side that starts them and reads the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.harness.jobs import run_job
from benchmarks.workload import Workload

_RANK_MODULE = "benchmarks.harness.training_rank"


@dataclass(frozen=True)
class TrainingJob:
    """What each rank runs.

    Args:
        builder: a module with a function ``build``, see :mod:`benchmarks.peers`.
        options: keyword arguments of ``build``.
        warmup_steps: training steps before time and memory are looked at: the first ones allocate gradients,
            optimizer states and buffers.
        measured_steps: training steps after those.
    """

    builder: str
    options: dict[str, Any]
    workload: Workload
    warmup_steps: int
    measured_steps: int


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of one rank.

    Args:
        step_seconds: of each measured step.
        cpu_seconds: processor time per measured step, of all threads and of the kernel on their behalf. What
            other processes do on the machine changes it far less than `step_seconds`.
        losses: of every step, warm-up included, in nats; this rank's or the global mean.
        steady_peak_bytes: most resident memory during the measured steps.
        process_peak_bytes: most resident memory of the process's life, building the model included.
        baseline_bytes: resident memory after importing torch, before the contender is imported and built.
    """

    step_seconds: list[float]
    cpu_seconds: float
    losses: list[float]
    steady_peak_bytes: int
    process_peak_bytes: int
    baseline_bytes: int


@dataclass(frozen=True)
class TrainingMeasurement:
    """The measurements of all ranks of one run together.

    Args:
        step_seconds: median over the steps of the slowest rank's time.
        losses: of every step, warm-up included: the mean over ranks (which all see equally many tokens).
        cpu_seconds, steady_peak_bytes, process_peak_bytes, baseline_bytes: as the ranks say; the largest.
    """

    step_seconds: float
    cpu_seconds: float
    losses: list[float] = field(repr=False)
    steady_peak_bytes: int
    process_peak_bytes: int
    baseline_bytes: int


def measure_training(
    job: TrainingJob, world_size: int, *, environment: Mapping[str, str], timeout: float
) -> TrainingMeasurement:
    """Runs `job` on `world_size` fresh ranks.

    Raises:
        RankError: a rank failed or took more than `timeout` seconds.
    """
    ranks = run_job(_RANK_MODULE, job, world_size, environment=environment, timeout=timeout)
    return summarize_ranks([RankMeasurement(**rank) for rank in ranks])


def summarize_ranks(ranks: Sequence[RankMeasurement]) -> TrainingMeasurement:
    """One measurement of a run from those of its ranks."""
    return TrainingMeasurement(
        step_seconds=median(max(step) for step in zip(*(rank.step_seconds for rank in ranks), strict=True)),
        cpu_seconds=max(rank.cpu_seconds for rank in ranks),
        losses=[fmean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)],
        steady_peak_bytes=max(rank.steady_peak_bytes for rank in ranks),
        process_peak_bytes=max(rank.process_peak_bytes for rank in ranks),
        baseline_bytes=max(rank.baseline_bytes for rank in ranks),
    )
