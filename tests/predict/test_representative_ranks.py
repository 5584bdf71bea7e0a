"""A search runs a few of a long pipeline's ranks, which stand for those that are built the same."""

from functools import partial

import pytest
import torch

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.parallelize.part import Decisions

MODEL = partial(GPT, vocab_size=512, context_length=32, num_layers=36, num_heads=2, width=16)
ADAMW = partial(torch.optim.AdamW, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full"},
        {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 2},
        {"tp": 2, "zero": 1},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_ranks_that_are_built_the_same_stand_for_each_other(fields):
    plan = ts.Plan(pp=16, micro_batches=32, **fields).resolve(32)
    tokens = torch.zeros(32, 32, dtype=torch.long)
    asked = {
        "world_size": 32, "inputs": tokens, "targets": tokens, "optimizer": ADAMW, "loss_fn": next_token_loss,
        "hardware": "a100-40", "decisions": Decisions(traced={}),
    }  # fmt: skip
    every = ts.estimate(MODEL, plan, **asked)
    few = ts.estimate(MODEL, plan, **asked, stop_above=2**40)
    assert few.complete
    assert [rank.rank for rank in few.ranks] == [rank.rank for rank in every.ranks]
    assert few.largest.stage == every.largest.stage
    assert few.largest.peak_device == every.largest.peak_device
    assert few.step_seconds == every.step_seconds
    for stood_for, run in zip(few.ranks, every.ranks, strict=True):
        assert stood_for.peak_allocated >= run.peak_allocated
    assert len({rank.peak_allocated for rank in few.ranks}) < len({rank.peak_allocated for rank in every.ranks})
