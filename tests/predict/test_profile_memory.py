"""Measured memory: what a real run's steps hold is what they were estimated to hold."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parity
import tensorshard as ts
from tensorshard.predict import MemoryProfile
from tensorshard.predict.rank_estimate import CATEGORIES

NEAR = 0.05  # as in test_estimate.py
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
BATCH = torch.zeros(4, 12, dtype=torch.long)


def _profiled(fields: dict[str, Any]) -> MemoryProfile:
    engine = ts.parallelize(
        partial(parity.build, "gpt"), ts.Plan(**fields), optimizer=ADAMW, loss_fn=parity.loss_function("gpt")
    )
    engine.step(BATCH, BATCH)
    with ts.profile_memory(engine) as profile:
        engine.step(BATCH, BATCH)
    assert "step" not in vars(engine)  # it is the class's own again
    profile.describe()
    return profile


def _estimated(fields: dict[str, Any]) -> ts.Estimate:
    dist.destroy_process_group()
    return ts.estimate(
        partial(parity.build, "gpt"),
        ts.Plan(**fields),
        world_size=2,
        inputs=BATCH,
        targets=BATCH,
        optimizer=ADAMW,
        loss_fn=parity.loss_function("gpt"),
        device="cpu",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [dict(zero=3), pytest.param(dict(zero=1, precision="bf16", recompute="full"), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_step_of_a_real_run(ranks, fields):
    measured = ranks(2, _profiled, fields)[0].rank
    estimated = ranks(1, _estimated, fields)[0].ranks[0]
    assert abs(measured.peak_allocated - estimated.peak_allocated) <= NEAR * measured.peak_allocated
    for name in CATEGORIES:
        off = abs(measured.by_category[name] - estimated.by_category[name])
        assert off <= NEAR * measured.peak_allocated, name
    assert max(moment.total for moment in measured.history) == measured.peak_allocated


def _on_disk(folder: str) -> dict[str, int]:
    offload = ts.Offload(optimizer="disk", gradients="disk", path=folder)
    return _profiled(dict(zero=1, offload=offload)).rank.by_category


def test_what_is_on_disk_is_not_counted(ranks, tmp_path):
    held = ranks(1, _on_disk, str(tmp_path))[0]
    assert held["optimizer states"] < held["parameters"] / 4  # but for its counts of steps


def test_nothing_is_known_before_the_end():
    with pytest.raises(ValueError, match="nothing is recorded yet"):
        _ = MemoryProfile(ts.Plan(), 1).rank
