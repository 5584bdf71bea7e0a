"""Runs every plan of a grid on four CPU ranks: what it takes, what was predicted, and what the search chose."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import tensorshard as ts
from benchmarks.harness.jobs import run_job
from benchmarks.harness.planner_models import MODELS, SAMPLES, batch, build
from benchmarks.models.case import Case
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.search.plan_search import plan_words

WORLD = 4
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, fused=True)
GRID: tuple[dict[str, Any], ...] = (
    dict(zero=0),
    dict(zero=1),
    dict(zero=2),
    dict(zero=3),
    dict(zero=0, micro_batches=4),
    dict(zero=1, recompute="full"),
    dict(zero=3, recompute="full"),
    dict(dp_replicate=2, dp_shard=2, zero=3),
    dict(tp=2, zero=0),
    dict(tp=2, zero=3),
    dict(tp=4, zero=0),
    dict(pp=2, micro_batches=4, zero=0),
    dict(pp=4, micro_batches=8, zero=0),
    dict(tp=2, pp=2, micro_batches=4, zero=0),
)
"""The plans that are run for every model. Plans that a model refuses are left out for it."""

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_TIMEOUT = 1800.0


@dataclass(frozen=True)
class RunsJob:
    """What the ranks of one world run.

    Args:
        model: a key of :data:`MODELS`.
        plans: fields of each plan.
        rounds: number of rounds. In each, every plan takes a step. Two steps before that do not count.
    """

    model: str
    plans: list[dict[str, Any]]
    rounds: int


@dataclass
class PlanRun:
    """A plan, with seconds of a step, and bytes of the rank with the most.

    Args:
        name: in a user's words.
        predicted: predicted seconds of a step.
        memory: estimated bytes.
        wall, busy: measured seconds, and computing seconds of all ranks together; medians over rounds.
        refused: why the model does not take the plan.
        chosen: whether the search chose it.
    """

    name: str
    predicted: float = 0.0
    memory: int = 0
    wall: float = 0.0
    busy: float = 0.0
    refused: str = ""
    chosen: bool = False


@dataclass
class ModelRuns:
    """All plans of a model.

    Args:
        search_seconds: duration of the search.
        estimated: number of plans that it estimated.
    """

    model: str
    runs: list[PlanRun]
    search_seconds: float = 0.0
    estimated: int = 0

    @property
    def valid(self) -> list[PlanRun]:
        """The plans that were run."""
        return [run for run in self.runs if not run.refused]

    @property
    def chosen(self) -> PlanRun:
        """The search's choice."""
        return next(run for run in self.valid if run.chosen)

    def regret(self, *, wall: bool) -> float:
        """How much longer the choice takes than the best plan that was run: in wall time, or in busy seconds."""
        best = min(run.wall if wall else run.busy for run in self.valid)
        return (self.chosen.wall if wall else self.chosen.busy) / best - 1


def run_model(name: str, hardware: Hardware, rounds: int, grid: Sequence[Mapping[str, Any]] = GRID) -> ModelRuns:
    """Searches, runs the grid and the chosen plan, and estimates each of them."""
    case = MODELS[name]
    inputs, targets = batch(case, SAMPLES // WORLD)
    begin = time.perf_counter()
    search = ts.find_plans(
        partial(build, case),
        world_size=WORLD,
        inputs=inputs,
        targets=targets,
        optimizer=OPTIMIZER,
        loss_fn=case.loss,
        hardware=hardware,
        global_batch=SAMPLES,
        top=1,
    )
    seconds = time.perf_counter() - begin
    choice = search.best.plan
    plans = [ts.Plan(**fields).resolve(WORLD) for fields in grid]
    if choice not in plans:
        plans.append(choice)
    ranks = run_job(
        "benchmarks.harness.planner_runs_rank",
        RunsJob(name, [plan.to_dict() for plan in plans], rounds),
        WORLD,
        environment=_ENVIRONMENT,
        timeout=_TIMEOUT,
    )
    runs = []
    for number, plan in enumerate(plans):
        run = PlanRun(plan_words(plan), chosen=plan == choice)
        runs.append(run)
        run.refused = next((rank["refused"][number] for rank in ranks if rank["refused"][number]), "")
        if run.refused:
            continue
        _predict(run, case, plan, hardware)
        # For each round: computing time of all ranks together, and the time of the slowest rank.
        busy = [sum(rank["busy"][number][i] for rank in ranks) for i in range(rounds)]
        wall = [max(rank["wall"][number][i] for rank in ranks) for i in range(rounds)]
        run.busy, run.wall = torch.tensor(busy).median().item(), torch.tensor(wall).median().item()
    return ModelRuns(name, runs, seconds, search.estimated)


def _predict(run: PlanRun, case: Case, plan: ts.Plan, hardware: Hardware) -> None:
    inputs, targets = batch(case, SAMPLES // plan.dp_size)
    estimate = ts.estimate(
        partial(build, case),
        plan,
        world_size=WORLD,
        inputs=inputs,
        targets=targets,
        optimizer=OPTIMIZER,
        loss_fn=case.loss,
        hardware=hardware,
        device="cpu",
    )
    assert estimate.step_time is not None
    run.predicted = estimate.step_time.seconds
    run.memory = estimate.largest.peak_device
