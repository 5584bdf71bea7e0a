"""Saved under each plan, at once or in the background, and loaded under each other: the same state, the same losses."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import parity
from tensorshard.checkpoint.integrity import check

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, dict()),
    "zero 3 on 4": (4, dict(zero=3)),
    "hybrid on 4": (4, dict(zero=3, dp_replicate=2)),
    "tp 2, zero 2 on 4": (4, dict(tp=2, zero=2)),
    "pp 2, tp 2 on 4": (4, dict(pp=2, tp=2, zero=0, micro_batches=2)),
    "pp 2, dp 2, tp 2 on 8": (8, dict(pp=2, tp=2, zero=0, micro_batches=2)),
    "offloaded on 2": (2, dict(zero=1, offload="cpu")),
}
_BEFORE, _AFTER = 3, 10
_SOME = {
    ("zero 3 on 4", "zero 3 on 4"),
    ("pp 2, tp 2 on 4", "single"),
    ("single", "tp 2, zero 2 on 4"),
    ("offloaded on 2", "hybrid on 4"),
    ("tp 2, zero 2 on 4", "offloaded on 2"),
}
_PAIRS = [(written, read) for written in PLANS for read in PLANS]
if "TENSORSHARD_WHOLE_GRID" not in os.environ:  # all of it takes many minutes
    _PAIRS = [pair for pair in _PAIRS if pair in _SOME]


def _losses(engine: Any, first: int, count: int) -> list[float]:
    steps = range(first, first + count)
    return [engine.step(*parity.shard(engine, *parity.batch("gpt", step))).item() for step in steps]


def _save(folder: Path, fields: dict[str, Any], background: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = parity.make_engine("gpt", fields)
    _losses(engine, 0, _BEFORE)
    state = engine.full_state_dict()
    engine.save(folder, background=background)
    losses = _losses(engine, _BEFORE, _AFTER)
    engine.wait_for_save()
    return state, losses


def _load(folder: Path, fields: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = parity.make_engine("gpt", fields)
    engine.load(folder)
    assert engine.step_count == _BEFORE
    return engine.full_state_dict(), _losses(engine, _BEFORE, _AFTER)


@pytest.mark.slow
@pytest.mark.parametrize(("written", "read"), _PAIRS)
def test_each_plan_reads_each_other(ranks, tmp_path, written, read):
    for background in (False, True):
        folder = tmp_path / f"background-{background}"
        state, losses = ranks(PLANS[written][0], _save, folder, PLANS[written][1], background)[0]
        check(folder)
        loaded, resumed = ranks(PLANS[read][0], _load, folder, PLANS[read][1])[0]
        assert state.keys() == loaded.keys()
        assert all(torch.equal(value, loaded[name]) for name, value in state.items())
        if written == read:
            assert resumed == losses
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(losses), rtol=1e-5, atol=1e-5)
