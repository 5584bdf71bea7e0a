"""Ten plans of one model at one global batch: predicted against measured times."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

import tensorshard as ts
from benchmarks.harness.jobs import run_job
from benchmarks.workload import OPTIMIZER, Workload, loss_fn
from tensorshard.predict.hardware import THIS_MACHINE, Hardware, find_hardware

SEQUENCES = 8  # of the global batch
MODEL = Workload("4M", num_layers=4, num_heads=4, width=256, vocab_size=2048, context_length=128, batch_size=SEQUENCES)
PLANS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, dict(zero=0)),
    (1, dict(zero=0, recompute="full")),
    (1, dict(zero=0, micro_batches=8)),
    (2, dict(zero=0)),
    (2, dict(zero=3)),
    (2, dict(zero=3, recompute="full", micro_batches=2)),
    (2, dict(tp=2, zero=0)),
    (2, dict(pp=2, micro_batches=4, zero=0)),
    (4, dict(zero=1)),
    (4, dict(zero=3, recompute="full")),
)
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TENSORSHARD_CACHE": "off"}
_TIMEOUT = 600.0


@dataclass(frozen=True)
class TimeJob:
    """What a world's ranks measure.

    Args:
        fields: of the plan.
        steps: how many steps are timed. The fastest counts.
    """

    model: Workload
    fields: dict[str, Any]
    steps: int = 5


@dataclass
class Timed:
    """A plan, and its busy seconds of a step, of all ranks together."""

    name: str
    predicted: float
    measured: float


def measure_plans(steps: int = 5) -> list[Timed]:
    """Measures all of :data:`PLANS`, with the machine's rates as measured right before."""
    hardware = measured_hardware()
    return [_measure(world, fields, hardware, steps) for world, fields in PLANS]


def measured_hardware() -> Hardware:
    """This machine, as ``tensorshard check`` measures it."""
    with TemporaryDirectory() as folder:
        environment = os.environ | _ENVIRONMENT | {"TENSORSHARD_CACHE": folder}
        command = [sys.executable, "-c", "from tensorshard.cli import main; raise SystemExit(main())", "check"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=_TIMEOUT)
        with mock.patch.dict(os.environ, {"TENSORSHARD_CACHE": folder}):
            found = find_hardware(THIS_MACHINE)
    assert found is not None  # the command would have failed
    return found


def _measure(world: int, fields: dict[str, Any], hardware: Hardware, steps: int) -> Timed:
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    plan = ts.Plan(**fields)
    own = of_a_data_rank(MODEL, plan, world)
    ranks = _run(TimeJob(own, fields, steps), world)
    inputs, targets = own.batch(0, 0)
    estimate = ts.estimate(
        own.model,
        plan,
        world_size=world,
        inputs=inputs,
        targets=targets,
        optimizer=OPTIMIZER,
        loss_fn=loss_fn,
        hardware=hardware,
        device="cpu",
    )
    assert estimate.step_time is not None
    name = f"{world} rank{'s' * (world > 1)}, {words}"
    return Timed(name, estimate.step_time.busy, sum(rank["cpu_seconds"] for rank in ranks))


def of_a_data_rank(model: Workload, plan: ts.Plan, world: int) -> Workload:
    """The work of one data rank, with its part of the global batch."""
    return replace(model, batch_size=model.batch_size // plan.resolve(world).dp_size)


def _run(job: TimeJob, world: int) -> list[dict[str, Any]]:
    module = "benchmarks.harness.estimates_time_rank"
    return run_job(module, job, world, environment=_ENVIRONMENT, timeout=_TIMEOUT)


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation of predicted and measured times. Equal times share the mean of their ranks."""

    def places(times: Sequence[float]) -> torch.Tensor:
        values = torch.tensor(times, dtype=torch.float64)
        below, at_most = values[:, None] > values, values[:, None] >= values
        return (below.sum(1) + at_most.sum(1)).double()

    return torch.corrcoef(torch.stack([places(predicted), places(measured)]))[0, 1].item()
