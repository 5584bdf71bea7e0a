"""Recomputed and compiled blocks compute what they computed."""

import unittest.mock
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from engines import Operations, engine_of, own_shard
from toys import Block, data


def _compiled(fields: dict[str, Any]) -> tuple:
    """Losses without and with compilation, and the modules that were compiled."""
    compiled = []

    def compile(forward: Any) -> Any:  # all but code generation, which takes a C++ compiler and its time
        compiled.append(type(forward.__self__).__name__)
        return original(forward, backend="aot_eager")

    original = torch.compile
    losses = []
    with unittest.mock.patch.object(torch, "compile", compile):
        for chosen in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(Block(4), Block(4)), nn.Linear(4, 3))
            engine = engine_of(model, compile=chosen, **fields)
            losses.append([engine.step(*own_shard(engine, *data(step))).item() for step in range(3)])
    return *losses, compiled


@pytest.mark.parametrize("level", [1, 3])
def test_compiled_blocks_compute_the_same(ranks, level):
    plain, losses, compiled = ranks(2, _compiled, dict(zero=level))[0]
    assert losses == pytest.approx(plain, rel=1e-5)
    assert compiled == ["Block", "Block"]


def _statistics(mode: str) -> dict[str, torch.Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    plan = ts.Plan(recompute=mode)
    engine = ts.parallelize(model, plan, optimizer=parity.ADAMW, loss_fn=nn.functional.mse_loss)
    inputs = torch.arange(24.0).view(6, 4).sin()
    engine.step(inputs, inputs.cos())
    return {name: value for name, value in engine.full_state_dict().items() if "running" in name}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_running_statistics_of_one_rank_are_taken_once(ranks, mode):
    """On one rank torch's own batch norm runs, which writes to them without saying so."""
    once, found = (ranks(1, _statistics, given)[0] for given in ("none", mode))
    assert len(found) == 4
    for name, value in once.items():
        assert not torch.equal(value, torch.full_like(value, "var" in name))  # where they started
        torch.testing.assert_close(found[name], value)


def _work(mode: str) -> tuple[int, int, list[float]]:
    """Calls of a block's norm, and matrix products, in one step."""
    engine = parity.make_engine("gpt", dict(recompute=mode))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    engine.model.blocks[0].mlp.up.register_forward_hook(count)
    with Operations() as operations:
        loss = engine.step(*parity.batch("gpt", 0))
    return calls, operations.counts["addmm"], [loss.item(), *operations.counts.values()]


def test_recomputation_computes_again(ranks):
    none, selective, full = (ranks(1, _work, mode)[0] for mode in ("none", "selective", "full"))
    assert (none[0], selective[0], full[0]) == (1, 2, 2)
    assert none[1] == selective[1] < full[1]
