"""Measures contenders' forward and backward through one layer: the side that starts the ranks and reads the outcome.

For times, all contenders share the same ranks and take turns, so that noise affects all alike. For memory, each has
its own ranks: otherwise one could reuse what another has freed, and that would not be counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.contender import Contender
from benchmarks.harness.jobs import run_job
from benchmarks.layers import LayerWork

_RANK_MODULE = "benchmarks.harness.layers_rank"

# Tensors are allocated by the system and returned to it at once, so the peak only counts what is in use.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class LayerJob:
    """What each rank runs.

    Args:
        builders: of the contenders, by name: a module in :mod:`benchmarks.peers`, and its options.
        rounds: how often each contender has its turn.
        warmup_steps: steps of each contender before anything is measured.
        measured_steps: steps in a turn.
    """

    work: LayerWork
    builders: dict[str, tuple[str, dict[str, Any]]]
    rounds: int
    warmup_steps: int
    measured_steps: int


@dataclass(frozen=True)
class RankLayerMeasurement:
    """What one rank measured of one contender.

    Args:
        step_seconds: seconds of each step of each round.
        cpu_seconds: for each round, processor time per step of all threads.
        peak_bytes: most resident memory during the steps, beyond what was held before them, which is only parameters.
    """

    step_seconds: list[list[float]]
    cpu_seconds: list[float]
    peak_bytes: int


@dataclass(frozen=True)
class LayerMeasurement:
    """What all ranks measured of one contender, by round.

    Args:
        step_seconds: median over the round's steps of the slowest rank's time.
        cpu_seconds: processor time per step, of all ranks together.
        peak_bytes: of the rank that has the most; one per launch.
    """

    step_seconds: list[float]
    cpu_seconds: list[float]
    peak_bytes: list[int]


def measure_layers(
    work: LayerWork,
    contenders: Sequence[Contender],
    world_size: int,
    *,
    rounds: int,
    memory_rounds: int,
    warmup_steps: int,
    measured_steps: int,
    environment: Mapping[str, str],
    timeout: float,
) -> dict[str, LayerMeasurement]:
    """Measures every contender, after checking that it computes what the plain layer does.

    Args:
        rounds: turns in which times are measured.
        memory_rounds: launches of each contender in which memory is measured.

    Raises:
        RankError: a rank failed or took too long. It also fails if a contender computes something else.
    """
    builders = {c.name: (c.builder, c.options) for c in contenders}
    timed = _launch(LayerJob(work, builders, rounds, warmup_steps, measured_steps), world_size, environment, timeout)
    peaks: dict[str, list[int]] = {name: [] for name in builders}
    for _ in range(memory_rounds):
        for name, builder in builders.items():
            job = LayerJob(work, {name: builder}, 1, warmup_steps, measured_steps)
            ranks = _launch(job, world_size, {**environment, **EXACT_MEMORY}, timeout)
            peaks[name].append(max(rank[name].peak_bytes for rank in ranks))
    return {name: summarize_layer([rank[name] for rank in timed], peaks[name]) for name in builders}


def summarize_layer(ranks: Sequence[RankLayerMeasurement], peak_bytes: Sequence[int]) -> LayerMeasurement:
    """One measurement of a contender from those of the ranks."""
    return LayerMeasurement(
        step_seconds=[
            median(max(step) for step in zip(*steps, strict=True))
            for steps in zip(*(rank.step_seconds for rank in ranks), strict=True)
        ],
        cpu_seconds=[sum(of_round) for of_round in zip(*(rank.cpu_seconds for rank in ranks), strict=True)],
        peak_bytes=list(peak_bytes),
    )


def _launch(
    job: LayerJob, world_size: int, environment: Mapping[str, str], timeout: float
) -> list[dict[str, RankLayerMeasurement]]:
    outcomes = run_job(_RANK_MODULE, job, world_size, environment=environment, timeout=timeout)
    return [{name: RankLayerMeasurement(**value) for name, value in outcome.items()} for outcome in outcomes]
