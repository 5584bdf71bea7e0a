"""Runs plans that were found for some amount of memory in a memory cgroup of that size, and in one that has no more
than was estimated. Neither must kill any."""

from dataclasses import dataclass
from typing import Any

import tensorshard as ts
from benchmarks.harness.jobs import run_job
from benchmarks.harness.memory_group import limited_memory
from benchmarks.harness.ranks import RankError
from benchmarks.workload import OPTIMIZER, Workload, loss_fn
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.search.plan_search import plan_words

WORLD = 2
MODEL = Workload("57M", num_layers=8, num_heads=12, width=768, vocab_size=512, context_length=128, batch_size=8)
SIZES = (3000, 2000, 1500, 1200, 1000, 800, 700, 600)
"""MiB per rank."""

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_TIMEOUT = 900.0


@dataclass(frozen=True)
class MemoryJob:
    """Steps of a model under a plan with these fields. `samples` are those of one data rank."""

    work: Workload
    fields: dict[str, Any]
    samples: int
    steps: int = 6  # after the first few, freed memory is kept


@dataclass(frozen=True)
class LimitedRun:
    """Steps in a memory cgroup.

    Args:
        peak: bytes of all ranks together, page cache included.
        killed: whether the limit killed a rank.
        limited: whether there was a limit.
        failure: the error of a rank, in a line.
    """

    peak: int
    killed: bool
    limited: bool
    failure: str = ""


@dataclass(frozen=True)
class MemoryRun:
    """The result for one size.

    Args:
        given: bytes of a rank.
        plan: the chosen one, in words; "" if none fits.
        estimated: bytes of the rank with the most.
        within: the run with the bytes that were given for each rank.
        tight: the run with the bytes that were estimated for each rank.
        failure: the error of the search, in a line.
    """

    given: int
    plan: str = ""
    estimated: int = 0
    within: LimitedRun | None = None
    tight: LimitedRun | None = None
    failure: str = ""


def run_size(mebibytes: int, hardware: Hardware) -> MemoryRun:
    """Finds the best plan for `mebibytes` of memory per rank, and runs it in both cgroups."""
    given = mebibytes << 20
    inputs, targets = MODEL.batch(0, 0)
    try:
        search = ts.find_plans(
            MODEL.constructed,
            world_size=WORLD,
            inputs=inputs,
            targets=targets,
            optimizer=OPTIMIZER,
            loss_fn=loss_fn,
            hardware=hardware,
            memory=given,
            global_batch=MODEL.batch_size,
            top=1,
        )
    except ValueError as error:
        return MemoryRun(given, failure=str(error).split(" (")[0])
    best = search.best
    within, tight = (_run_within(best.plan, size) for size in (given, best.memory))
    return MemoryRun(given, plan_words(best.plan), best.memory, within, tight)


def _run_within(plan: ts.Plan, limit: int) -> LimitedRun:
    """Steps of `plan` in a cgroup of `limit` bytes for each rank."""
    job = MemoryJob(MODEL, plan.to_dict(), MODEL.batch_size // plan.dp_size)
    failure = ""
    with limited_memory(limit * WORLD) as (variables, use):
        try:
            run_job(
                "benchmarks.harness.planner_memory_rank",
                job,
                WORLD,
                environment={**_ENVIRONMENT, **variables},
                timeout=_TIMEOUT,
            )
        except RankError as error:
            failure = str(error).splitlines()[-1]
    return LimitedRun(use.peak_bytes, use.killed, use.limited, failure)
