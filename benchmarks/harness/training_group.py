"""Measures contenders that train the same model in turn, and joins the measurements."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from rich.console import Console

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.harness.statistics import check_losses_agree
from benchmarks.harness.training import TrainingJob, TrainingMeasurement, measure_training
from benchmarks.harness.turns import TurnsEndedError, in_rotation, turns
from benchmarks.workload import Workload

LOSS_TOLERANCE = 2e-5  # relative; fp32 sums in other orders make a difference of about 1e-6
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 1800.0  # seconds of a round; DeepSpeed compiles an operator at its first start

QUANTITIES = (
    Quantity("step_seconds", "step time", "s"),
    Quantity("cpu_seconds", "CPU time", "s", headline=False),
    Quantity("steady_peak_bytes", "peak memory per rank", "bytes"),
    Quantity("process_peak_bytes", "start included", "bytes", headline=False),
)


@dataclass(frozen=True)
class Steps:
    """How much each contender trains.

    Args:
        rounds: how often each contender is started.
        warmup, measured: steps of a round.
        in_turn: whether all contenders of a round are started together and take turns of a step each. Then a machine
            whose speed changes within a minute is equally fast for all of them. Their memory must fit together.
    """

    rounds: int
    warmup: int
    measured: int
    in_turn: bool = False


def measure_training_group(
    lineup: Sequence[Contender],
    workload: Workload,
    world_size: int,
    steps: Steps,
    *,
    title: str,
    packages: Sequence[str],
    obstacles: Mapping[str, str],
    console: Console,
    environment: Mapping[str, str] | None = None,
    reference: dict[str, list[float]] | None = None,
) -> Group:
    """Measures the contenders, each on `world_size` ranks of one thread.

    Args:
        packages: packages whose versions are reported.
        obstacles: why some contenders cannot be measured.
        environment: further variables of every contender's ranks.
        reference: losses that those measured here must agree with; gains those that are measured.

    Raises:
        LossMismatchError: a contender did not train as the others did.
        RankError: a rank failed or took too long.
    """
    reference = {} if reference is None else reference
    variables = {**NO_GPU, **(environment or {})}
    started = [contender for contender in lineup if contender.name not in obstacles]
    runs: dict[str, list[TrainingMeasurement]] = {contender.name: [] for contender in started}
    for number in range(1, steps.rounds + 1):
        for some in [started] if steps.in_turn else [[contender] for contender in started]:
            names = ", ".join(contender.name for contender in some)
            with console.status(f"{workload.name}, round {number} of {steps.rounds}: {names}"):
                measured = _measure_together(some, workload, world_size, steps, variables)
            for name, run in measured.items():
                runs[name].append(run)
                reference.setdefault(name, run.losses)
                check_losses_agree({**reference, name: run.losses}, LOSS_TOLERANCE)
    return Group(
        title=title,
        date=date.today().isoformat(),
        versions=installed_versions(packages),
        settings=_settings(workload, world_size, steps, environment or {}),
        rows=make_rows(
            {q.key: {name: [getattr(run, q.key) for run in of] for name, of in runs.items()} for q in QUANTITIES},
            ours=[contender.name for contender in lineup if contender.ours],
            losses={name: of[0].losses[-1] for name, of in runs.items()},
            notes=obstacles,
        ),
    )


def _settings(workload: Workload, world_size: int, steps: Steps, environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "ranks": world_size,
        "rounds": steps.rounds,
        "warmup_steps": steps.warmup,
        "measured_steps": steps.measured,
        "step_by_step": steps.in_turn,
        "environment": dict(environment),
        **asdict(workload),
    }


def _measure_together(
    contenders: Sequence[Contender],
    workload: Workload,
    world_size: int,
    steps: Steps,
    environment: Mapping[str, str],
) -> dict[str, TrainingMeasurement]:
    """Starts the contenders together. One of them computes at a time."""
    names = [contender.name for contender in contenders]
    futures: dict[str, Future[TrainingMeasurement]] = {}
    # The pool is left last: its jobs end only when their ranks have, and these wait for turns.
    with ThreadPoolExecutor(len(contenders)) as pool, turns(dict.fromkeys(names, world_size)) as in_turn:
        for contender in contenders:
            job = TrainingJob(
                f"benchmarks.peers.{contender.builder}", contender.options, workload, steps.warmup, steps.measured
            )
            variables = {**contender.environment, **environment, **in_turn.environment(contender.name)}
            futures[contender.name] = pool.submit(
                measure_training, job, world_size, environment=variables, timeout=RUN_TIMEOUT
            )
        try:
            in_turn.connect(lambda name: futures[name].done())
            for name in in_rotation(names, 1 + steps.measured):
                in_turn.give(name)
        except TurnsEndedError as error:
            in_turn.close()
            futures[error.name].result()  # says why
            raise
        return {name: futures[name].result() for name in names}
