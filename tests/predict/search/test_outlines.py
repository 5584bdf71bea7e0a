"""Outlines: what estimates with a few of a deep model's blocks say of all of them."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.search import outlines, search
from tensorshard.predict.search.fewer_blocks import equal_blocks
from tensorshard.predict.search.question import Question, ask

TOKENS = torch.zeros(2, 16, dtype=torch.long)
MODEL = partial(GPT, 64, 16, 14, 4, 32)
ARGUMENTS: dict[str, Any] = dict(
    inputs=TOKENS,
    targets=TOKENS,
    optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
    loss_fn=next_token_loss,
    hardware="h100",
    global_batch=16,
)
PLANS = [
    dict(zero=3),
    dict(zero=1, recompute="full", micro_batches=2),
    dict(zero=0, tp=2, sequence_parallel=True),
]


@pytest.fixture(autouse=True)
def _for_fewer_blocks(monkeypatch):
    monkeypatch.setattr(outlines, "_WORTH_IT", 14)  # so that tests take less time


def _question() -> Question:
    if dist.is_initialized():
        dist.destroy_process_group()
    return ask(MODEL, world_size=4, memory=None, fixed={"precision": "bf16"}, **ARGUMENTS)


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_an_outline_is_just_below_the_estimate(fields):
    question, names = _question(), equal_blocks(MODEL())
    plan = question.plan(**fields).resolve(4)
    assert outlines.can_outline(question, plan, names)
    found = question.estimate(plan)
    outlined = outlines.outline(question, plan, names)
    device = found.largest.peak_device
    assert 0.96 * device <= outlined.memory <= 1.001 * device
    assert 0.98 * found.step_time.seconds <= outlined.seconds <= 1.001 * found.step_time.seconds


def test_pipelines_and_modules_are_estimated_at_once():
    question, names = _question(), equal_blocks(MODEL())
    assert not outlines.can_outline(question, question.plan(pp=2, micro_batches=2).resolve(4), names)
    assert not outlines.can_outline(question, question.plan().resolve(4), names[:12])


def _found(**fields: Any) -> ts.PlanSearch:
    if dist.is_initialized():
        dist.destroy_process_group()
    fixed = {"precision": "bf16", "pp": 1, "tp": 1, "dp_shard": 4, "zero": 3, **fields}
    return ts.find_plans(MODEL, world_size=4, fixed=fixed, top=2, **ARGUMENTS)


def test_the_same_plans_are_found_with_fewer_estimates():
    with mock.patch.object(search, "can_outline", lambda *_: False):
        every = _found(micro_batches=1)
    outlined = _found(micro_batches=1)
    assert [found.plan for found in outlined] == [found.plan for found in every]
    assert [found.seconds for found in outlined] == [found.seconds for found in every]
    assert outlined.estimated <= every.estimated


def test_a_model_that_needs_all_of_its_blocks_is_estimated():
    def broken(*_: Any) -> None:
        raise IndexError("block 13")

    with mock.patch.object(search, "outline", broken):
        assert _found(recompute="none", micro_batches=1).estimated == 1
