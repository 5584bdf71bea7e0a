"""Parameters without elements, such as memories of a length of 0: kept whole, as they have nothing to shard."""

from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
from engines import ADAMW, engine_of, own_shard
from toys import data, squares


class Memory(nn.Module):
    """Puts a memory before its input, which may have no entries."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(0, 8))
        self.frozen = nn.Parameter(torch.randn(8, 0), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.memory.to(x.dtype), x])
        return x + self.linear(joined) * self.scale + self.frozen.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeds.seed(2)
        self.inlet, self.outlet = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Memory() for _ in range(2))
        self.unused = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(x)


def _run(fields: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = engine_of(Net(), **fields)
    losses = [engine.step(*own_shard(engine, *data(step))).item() for step in range(3)]
    parameters = dict(engine.model.named_parameters())
    assert parameters["blocks.0.memory"].shape == (0, 8)
    state = engine.full_state_dict()
    engine.save(folder)
    engine.load(folder)
    return {"losses": losses, "state": state}


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, dict(zero=3)),
        (2, dict(zero=3, recompute="full")),
        (2, dict(zero=3, micro_batches=2)),
        (4, dict(zero=3, dp_replicate=2)),
        (2, dict(zero=2)),
    ],
    ids=str,
)
def test_they_train_as_in_one_process(ranks, tmp_path, world, fields):
    model = Net()
    optimizer = ADAMW(model.parameters())
    losses = []
    for step in range(3):
        loss = squares(model(data(step)[0]), data(step)[1])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    parity.assert_same(ranks(world, _run, fields, str(tmp_path / "saved"))[0], {"losses": losses, "state": state}, 1e-5)


def _bf16() -> list[float]:
    engine = engine_of(Net(), zero=3, precision="bf16")
    return [engine.step(*own_shard(engine, *data(step))).item() for step in range(3)]


def test_they_train_in_bf16(ranks):
    for losses in ranks(2, _bf16):
        assert losses[-1] < losses[0]
