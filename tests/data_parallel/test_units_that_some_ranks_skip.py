"""ZeRO 3 where the data ranks call different blocks: each gets the numbers of one process that runs all parts."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
import strict_nccl
from engines import ADAMW, engine_of
from tensorshard.comm.groups import CollectiveMismatchError
from toys import data, squares

STEPS, BLOCKS = 6, 5


class Routed(nn.Module):
    """Calls the blocks that its input names, in that order; those above 10 without a gradient."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        seeds.seed(4)
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(BLOCKS))
        self.outlet = nn.Linear(6, 3)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for index in route[0].tolist():
            if index >= 10:
                with torch.no_grad():
                    constant = self.blocks[index - 10](x)
                x = x + constant
            elif index >= 0:
                block = self.blocks[index]
                if self.checkpointed:
                    x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = x + block(x)
        return self.outlet(x)


Route = Callable[[int, int], list[int]]


def _layer_drop(step: int, part: int) -> list[int]:
    draw = random.Random(10 * step + part)
    return [block for block in range(BLOCKS) if draw.random() < 0.5]


def _permuted(step: int, part: int) -> list[int]:
    return random.Random(10 * step + part).sample(range(BLOCKS), BLOCKS)


ROUTES: dict[str, Route] = {
    "all": lambda step, part: list(range(BLOCKS)),
    "images on one part": lambda step, part: [0, 1, 2, 3, 4] if part == 1 else [2, 3, 4],
    "a head for each task": lambda step, part: [0, 1, 2 + part % 3],
    "layer drop": _layer_drop,
    "one expert, others for many steps": lambda step, part: [step % 2 if part == 0 else 3],
    "early exit": lambda step, part: list(range(1 + (step + part) % BLOCKS)),
    "no block on one part": lambda step, part: [] if part == 0 else [1, 2],
    "not in the order of the modules": lambda step, part: [3, 1, 0] if part == 0 else [1],
    "again and again": lambda step, part: [0, 1, 0, 1, 0, 1] if part == 0 else [0, 1] * (step % 3),
    "skipped late": lambda step, part: [0, 1, 2, 3, 4] if step < 4 or part == 0 else [0, 2, 4],
    "called late": lambda step, part: [0, 1, 2, 3, 4] if step > 3 and part == 1 else [0, 1, 3],
    "in different orders": lambda step, part: [0, 1, 2] if part == 0 else [2, 0, 1],
    "in any order": _permuted,
    "without a gradient late": lambda step, part: [0, 11, 2, 3, 4] if part == 0 and step > 3 else [0, 1, 2, 3, 4],
}


def _batch(route: Route, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = data(10 * step + part, 4)
    called = route(step, part)
    return x, torch.tensor([[*called, *([-1] * (8 - len(called)))]] * len(x)), y


def _parts(name: str, step: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    return [_batch(ROUTES[name], step, part) for part in range(count)]


def _train(name: str, fields: dict[str, Any], checkpointed: bool = False) -> tuple:
    engine = engine_of(Routed(checkpointed), **fields)
    losses = []
    micro_batches, rank = fields.get("micro_batches", 1), engine.mesh.dp_rank
    for step in range(STEPS):
        parts = _parts(name, step, engine.mesh.dp_size * micro_batches)
        own = parts[rank * micro_batches : (rank + 1) * micro_batches]
        x, route, y = (torch.cat(tensors) for tensors in zip(*own, strict=True))
        losses.append(engine.step((x, route), y).item())
        if step == 2:  # a forward without a backward
            engine.evaluate((x, route), y)
    return losses, engine.full_state_dict()


def _expected(name: str, parts: int) -> tuple:
    model = Routed()
    optimizer = ADAMW(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = sum(squares(model(x, route), y) for x, route, y in _parts(name, step, parts)) / parts
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


FIELDS: list[dict[str, Any]] = [
    dict(),
    dict(dp_replicate=2),
    dict(micro_batches=2),
    dict(recompute="full"),
    dict(precision="bf16"),
]


@pytest.mark.fast_cases("skipped late-{}")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_parts_that_call_different_blocks(ranks, name, fields):
    world_size = 4 if "dp_replicate" in fields else 2
    losses, state = ranks(world_size, _train, name, dict(zero=3, **fields))[0]
    expected, wanted = _expected(name, world_size * fields.get("micro_batches", 1))
    tolerance = 3e-2 if "precision" in fields else 2e-5
    assert losses == pytest.approx(expected, rel=tolerance)
    parity.assert_same_state(state, wanted, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer drop", pytest.param("in any order", marks=pytest.mark.slow)])
def test_on_four_ranks_and_with_checkpoints(ranks, name):
    losses, state = ranks(4, _train, name, dict(zero=3), True)[0]
    expected, wanted = _expected(name, 4)
    assert losses == pytest.approx(expected, rel=2e-5)
    parity.assert_same_state(state, wanted, 2e-5)


def _another_order_late() -> str:
    """The ranks are alike for three steps; then one calls its blocks in another order, alone."""
    engine = engine_of(Routed(), zero=3)
    for step in range(3):
        x, route, y = _batch(ROUTES["all"], step, engine.mesh.dp_rank)
        engine.step((x, route), y)
    x, route, y = _batch(lambda *_: [1, 0, 2, 3, 4], 3, engine.mesh.dp_rank)
    try:
        engine.step((x, route), y)
    except CollectiveMismatchError as error:
        return str(error)
    return "taken"


@pytest.mark.fast_cases("strict_nccl")
@pytest.mark.parametrize("backend", ["gloo", strict_nccl.NAME])
def test_another_order_after_the_first_steps_is_told(ranks, backend):
    for message in ranks(2, _another_order_late, backend=backend, group_timeout=60):
        assert "calls blocks.0 in another order" in message and "leaving some out is fine" in message
