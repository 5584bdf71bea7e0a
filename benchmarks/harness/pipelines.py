"""Measures pipelined contenders' steps: the side that starts the ranks and reads the outcome.

All contenders share the same ranks and take turns, so that noise affects all alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.contender import Contender
from benchmarks.harness.jobs import run_job
from benchmarks.harness.statistics import check_losses_agree
from benchmarks.pipelines import PipelineWork

_RANK_MODULE = "benchmarks.harness.pipelines_rank"
_LOSS_TOLERANCE = 2e-5  # relative; fp32 sums in other orders make about 1e-6


@dataclass(frozen=True)
class PipelineJob:
    """What each rank runs.

    Args:
        builders: of the contenders, by name: a module in :mod:`benchmarks.peers`, and its options.
        rounds: how often each contender has its turn.
        warmup_steps: steps of each contender before anything is measured.
        measured_steps: steps in a turn.
    """

    work: PipelineWork
    builders: dict[str, tuple[str, dict[str, Any]]]
    rounds: int
    warmup_steps: int
    measured_steps: int


@dataclass(frozen=True)
class RankPipelineMeasurement:
    """What one rank measured of one contender.

    Args:
        step_seconds: seconds of each step of each round.
        cpu_seconds: for each round, processor time per step of all threads.
        losses: of the warm-up steps, if the rank knows them.
    """

    step_seconds: list[list[float]]
    cpu_seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class PipelineMeasurement:
    """What all ranks measured of one contender, by round.

    Args:
        step_seconds: median over the round's steps of the slowest rank's time.
        cpu_seconds: processor time per step, of all ranks together.
    """

    step_seconds: list[float]
    cpu_seconds: list[float]


def measure_pipelines(
    work: PipelineWork,
    contenders: Sequence[Contender],
    world_size: int,
    *,
    rounds: int,
    warmup_steps: int,
    measured_steps: int,
    environment: Mapping[str, str],
    timeout: float,
) -> dict[str, PipelineMeasurement]:
    """Measures every contender, after checking that all have the same losses.

    Raises:
        RankError: a rank failed, or took too long.
        LossMismatchError: a contender's losses differ from the others'.
    """
    builders = {c.name: (c.builder, c.options) for c in contenders}
    job = PipelineJob(work, builders, rounds, warmup_steps, measured_steps)
    outcomes = run_job(_RANK_MODULE, job, world_size, environment=environment, timeout=timeout)
    measured = {name: [RankPipelineMeasurement(**rank[name]) for rank in outcomes] for name in builders}
    check_losses_agree({name: ranks[-1].losses for name, ranks in measured.items()}, _LOSS_TOLERANCE)
    return {name: summarize_pipeline(ranks) for name, ranks in measured.items()}


def summarize_pipeline(ranks: Sequence[RankPipelineMeasurement]) -> PipelineMeasurement:
    """One measurement of a contender from those of the ranks."""
    return PipelineMeasurement(
        step_seconds=[
            median(max(step) for step in zip(*steps, strict=True))
            for steps in zip(*(rank.step_seconds for rank in ranks), strict=True)
        ],
        cpu_seconds=[sum(of_round) for of_round in zip(*(rank.cpu_seconds for rank in ranks), strict=True)],
    )
