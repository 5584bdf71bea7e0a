"""Measures steps on long sequences, and of mixtures of experts: what starts the ranks and reads the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experts import MixtureWork
from benchmarks.harness.contender import Contender
from benchmarks.harness.jobs import run_job
from benchmarks.harness.layers import EXACT_MEMORY
from benchmarks.harness.memory_group import limited_memory
from benchmarks.harness.ranks import RankError
from benchmarks.sequences import SequenceWork

_RANK_MODULE = "benchmarks.harness.sequences_rank"


@dataclass(frozen=True)
class SequenceJob:
    """What each rank runs.

    Args:
        builders: of the contenders, by name: a module in :mod:`benchmarks.peers`, and its options.
        rounds: how often each contender has its turn, of one step.
        expected: the first loss. None: it is not compared.
    """

    work: SequenceWork | MixtureWork
    builders: dict[str, tuple[str, dict[str, Any]]]
    rounds: int
    expected: float | None = None


@dataclass(frozen=True)
class SequenceMeasurement:
    """What the ranks measured of a contender.

    Args:
        loss: of the first step.
        step_seconds: of each round, the slowest rank's.
        cpu_seconds: of each round, of all ranks together.
        peak_bytes: most resident memory during the steps beyond that before the model was built, of the rank that has
            the most.
        received_bytes: that attention, or the experts, received in a step, the mean over ranks.
    """

    loss: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    received_bytes: float = 0.0


def measure_sequences(
    work: SequenceWork | MixtureWork,
    contenders: Sequence[Contender],
    world_size: int,
    *,
    rounds: int,
    expected: float | None,
    environment: Mapping[str, str],
    timeout: float,
) -> dict[str, SequenceMeasurement]:
    """Measures every contender: times in turn on the same ranks, memory on ranks of its own.

    Raises:
        RankError: a rank failed or took too long. It also fails if the first loss is not `expected`.
    """
    builders = {c.name: (c.builder, c.options) for c in contenders}
    timed = run_job(
        _RANK_MODULE,
        SequenceJob(work, builders, rounds, expected),
        world_size,
        environment=environment,
        timeout=timeout,
    )
    measurements = {}
    for name, builder in builders.items():
        alone = run_job(
            _RANK_MODULE,
            SequenceJob(work, {name: builder}, 1, expected),
            world_size,
            environment={**environment, **EXACT_MEMORY},
            timeout=timeout,
        )
        of_ranks = [rank[name] for rank in timed]
        measurements[name] = SequenceMeasurement(
            loss=of_ranks[0]["loss"],
            step_seconds=[max(times) for times in zip(*(rank["step_seconds"] for rank in of_ranks), strict=True)],
            cpu_seconds=[sum(times) for times in zip(*(rank["cpu_seconds"] for rank in of_ranks), strict=True)],
            peak_bytes=max(rank[name]["peak_bytes"] for rank in alone),
            received_bytes=sum(rank["received_bytes"] for rank in of_ranks) / world_size,
        )
    return measurements


def trains_in(
    work: SequenceWork, contender: Contender, world_size: int, *, limit_bytes: int, environment: Mapping[str, str]
) -> bool:
    """Whether two steps succeed where the ranks together have `limit_bytes` of memory.

    Raises:
        RankError: a rank failed for another reason.
    """
    job = SequenceJob(work, {contender.name: (contender.builder, contender.options)}, 1)
    with limited_memory(limit_bytes) as (variables, use):
        try:
            run_job(
                _RANK_MODULE,
                job,
                world_size,
                environment={**environment, **EXACT_MEMORY, **variables},
                timeout=300.0,
            )
        except RankError as error:
            if "exit status -9" not in str(error):  # not killed by the system
                raise
            return False
    return not use.killed
