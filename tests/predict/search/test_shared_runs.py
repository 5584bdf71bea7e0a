"""Estimates of one search share runs: each says what it says alone. One that does not fit ends early."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.estimate import Estimate, estimate
from tensorshard.predict.search.problem import SearchProblem, make_problem

WORLD = 4
TOKENS = torch.zeros(8, 16, dtype=torch.long)
MODEL = partial(GPT, 64, 16, 4, 4, 32)
GIVEN: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, lr=1e-3),
    "loss_fn": next_token_loss,
    "hardware": "h100",
}


@pytest.fixture
def problem() -> SearchProblem:
    if dist.is_initialized():
        dist.destroy_process_group()
    batch = {"inputs": TOKENS, "targets": TOKENS, "memory": None, "global_batch": 8, "fixed": None}
    return make_problem(MODEL, world_size=WORLD, **batch, **GIVEN)


def _plan(**fields: Any) -> ts.Plan:
    return ts.Plan(**{"zero": 0, "precision": "bf16", **fields}).resolve(WORLD)


def _alone(problem: SearchProblem, plan: ts.Plan, **options: Any) -> Estimate:
    inputs, targets = problem.batch(problem.global_batch // plan.dp_size)
    return estimate(MODEL, plan, world_size=WORLD, inputs=inputs, targets=targets, **GIVEN, **options)


@pytest.mark.slow
def test_estimates_that_share_runs_say_what_each_says_alone(problem):
    plans = [
        _plan(pp=4, micro_batches=4),
        _plan(pp=4, micro_batches=8),
        _plan(pp=2, tp=2, micro_batches=4),
        _plan(pp=2, tp=2, micro_batches=2, recompute="full"),
        _plan(tp=4, sequence_parallel=True),
    ]
    _alone(problem, plans[0])  # the first in a process also holds what it imports
    for plan in plans:
        shared, alone = problem.estimate(plan), _alone(problem, plan)
        assert shared.peaks == alone.peaks
        assert [rank.operations for rank in shared.ranks] == [rank.operations for rank in alone.ranks]
    assert len(problem.shared.traced or {}) == 2  # one for each number of tp ranks
    assert problem.captures


@pytest.mark.slow
def test_an_estimate_ends_at_a_rank_that_takes_too_much(problem):
    plan = _plan(pp=4, micro_batches=4)
    every = _alone(problem, plan)
    first = every.ranks[0].peak_device
    ended = _alone(problem, plan, stop_above=first - 1)
    assert not ended.complete and [rank.stage for rank in ended.ranks] == [0]
    assert ended.largest.peak_device == first and ended.step_time is None
    fits = _alone(problem, plan, stop_above=every.largest.peak_device)
    assert fits.complete and fits.peaks == every.peaks and fits.step_time is not None
