"""ZeRO 3 with blocks that return views, into which the model may write."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import parity
import seeds
from engines import ADAMW, engine_of
from toys import data, squares


class Block(nn.Module):
    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.view(self.layer(x))


class Viewed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        seeds.seed(4)
        self.blocks = nn.ModuleList(Block(VIEWS[name]) for _ in range(3))
        self.outlet = nn.Linear(6, 3)
        self.writes = name in WRITES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            if isinstance(y, tuple):
                y, other = y
                y += other.mean(1, keepdim=True)
            if self.writes:
                y += x
                y.mul_(2.0)
            x = torch.tanh(y)
        return self.outlet(x)


VIEWS: dict[str, Callable] = {
    "a view": lambda y: y.view(-1, 2, 3).flatten(1),
    "no view": lambda y: y,
    "a part": lambda y: torch.cat([y, y], 1)[:, 3:9],
    "a view and what it is a view of": lambda y: (y.view(-1, 6), y),
    "not written to": lambda y: y.view(-1, 2, 3).flatten(1),
}
WRITES = {"a view", "no view", "a part", "a view and what it is a view of"}


def _train(name: str, recompute: str) -> tuple:
    engine = engine_of(Viewed(name), zero=3, recompute=recompute)
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*returned a view tensor")
        for step in range(4):
            x, y = (tensor.chunk(2)[engine.mesh.dp_rank] for tensor in data(step, 8))
            losses.append(engine.step(x, y).item())
    return losses, engine.full_state_dict()


@pytest.mark.fast_cases("a view-none")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_that_are_written_to(ranks, name, recompute):
    losses, state = ranks(2, _train, name, recompute)[0]
    model = Viewed(name)
    optimizer = ADAMW(model.parameters())
    expected = []
    for step in range(4):
        x, y = data(step, 8)
        loss = squares(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-5)
    parity.assert_same_state(state, model.state_dict(), 2e-5)
