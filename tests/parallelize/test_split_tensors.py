"""Stages of a pipeline that share modules: split by tp, and sharded."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from toys import plain_loop

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
WIDTH = 8


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.embed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x + self.shared(x) + self.down(nn.functional.gelu(self.up(x * self.embed(time))))


class DiffusionTransformer(nn.Module):
    """As diffusers' are: the end calls a part of the first block, and all blocks take one condition.

    And a module is shared by all blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(WIDTH, WIDTH)
        shared = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block(shared) for _ in range(2))
        self.out = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = self.condition(x.mean(dim=1, keepdim=True))  # crosses the cut
        for block in self.blocks:
            x = block(x, time)
        return self.out(x * self.blocks[0].embed(time))


class SharedBlock(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class SharedLayers(nn.Module):
    """Layers that the model calls by themselves, and its blocks as parts of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SharedBlock(self.up, self.down) for _ in range(3))
        self.out = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


SPLIT = {
    DiffusionTransformer: {"condition", "blocks.0.embed.0", "blocks.0.embed.2", "blocks.0.shared.0"},
    SharedLayers: {"up", "down"},
}


def _build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, torch.cat([x.sin(), x.cos()], -1)


def _train(kind: type[nn.Module], fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(
        _build(kind), ts.Plan(**fields), optimizer=ADAMW, loss_fn=nn.functional.mse_loss, sample_inputs=_batch(0)[0]
    )
    steps = [parity.shard(engine, *_batch(step)) for step in range(3)]
    return [engine.step(*step).item() for step in steps], engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (DiffusionTransformer, dict(tp=2)),
        (DiffusionTransformer, dict(zero=3)),
        (SharedLayers, dict(tp=2)),
    ],
)
def test_stages_that_share_modules(ranks, kind, fields):
    if "tp" in fields:
        split = find_tensor_plan(_build(kind), 2, inputs=_batch(0)[0]).plan.to_dict()
        assert SPLIT[kind] <= split.keys()
    for rank, (losses, state) in enumerate(ranks(4, _train, kind, dict(pp=2, micro_batches=2, **fields))):
        model = _build(kind)
        steps = [[_batch(step)] for step in range(3)]
        expected = list(plain_loop(model, ADAMW(model.parameters()), steps, loss_fn=nn.functional.mse_loss))
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        if rank == 0:
            parity.assert_same_state(state, model.state_dict(), 1e-10)
