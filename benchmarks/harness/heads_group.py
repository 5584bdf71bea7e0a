"""Measures contenders for a head in turn, and joins the measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.heads import HeadMeasurement, OutOfMemoryError, job_of, measure_head
from benchmarks.harness.ranks import RankError
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.heads import HeadWork

_WARMUP_STEPS = 2


def measure_in_turn(
    work: HeadWork,
    lineup: Sequence[Contender],
    world_size: int,
    *,
    title: str,
    quantities: Sequence[Quantity],
    obstacles: Mapping[str, str],
    packages: Sequence[str],
    rounds: int,
    measured_steps: int,
    threads: int,
    environment: Mapping[str, str],
    timeout: float,
    console: Console,
) -> Group:
    """Measures the contenders one after the other, `rounds` times over.

    Args:
        quantities: of :class:`HeadMeasurement`.
        obstacles: why some contenders cannot be measured. A contender that runs out of a GPU's memory is added, and so
            is a peer that fails. Its error is printed, and the others go on, since their turns may take hours.
        packages: packages whose versions are reported.
        threads: number of threads of each rank.
        environment: environment variables of the ranks.
        timeout: of a turn, in seconds.

    Raises:
        RankError: a rank of ours failed, or took too long.
    """
    notes = {contender.name: obstacles[contender.name] for contender in lineup if contender.name in obstacles}
    runs: dict[str, list[HeadMeasurement]] = {c.name: [] for c in lineup if c.name not in notes}
    for round_number in range(rounds):
        for contender in lineup:
            if contender.name in notes:
                continue
            job = job_of(
                contender,
                work,
                threads=threads,
                exact=round_number == 0,
                warmup_steps=_WARMUP_STEPS,
                measured_steps=measured_steps,
            )
            variables = {**environment, **contender.environment}
            with console.status(f"{title}, round {round_number + 1} of {rounds}: {contender.name}"):
                try:
                    measured = measure_head(job, world_size, environment=variables, timeout=timeout)
                except OutOfMemoryError:
                    notes[contender.name] = "out of memory"
                except RankError as error:
                    if contender.ours:
                        raise
                    console.print(f"{contender.name}: {error}", markup=False)
                    notes[contender.name] = "failed"
                else:
                    runs[contender.name].append(measured)
                    continue
                del runs[contender.name]
    samples = {q.key: {name: [getattr(run, q.key) for run in of] for name, of in runs.items()} for q in quantities}
    if "error" in samples:  # the step is the same each time, and was compared the first time
        samples["error"] = {name: [of[0].error] * len(of) for name, of in runs.items()}
    return Group(
        title=title,
        date=date.today().isoformat(),
        versions=installed_versions(packages),
        settings={
            "ranks": world_size,
            "threads": threads,
            "rounds": rounds,
            "measured_steps": measured_steps,
            **asdict(work),
        },
        rows=make_rows(samples, ours=[c.name for c in lineup if c.ours], notes=notes),
    )
