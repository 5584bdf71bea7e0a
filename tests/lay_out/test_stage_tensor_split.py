"""Tensor parallelism within the stages of a pipeline, where stages share more than what crosses a cut."""

from functools import partial
from typing import Any

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


def _build() -> nn.Module:
    torch.manual_seed(3)
    return DiffusionTransformer().double()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, torch.cat([x.sin(), x.cos()], -1)


def _train(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(
        _build(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=nn.functional.mse_loss, sample_inputs=_batch(0)[0]
    )
    return [engine.step(*_batch(step)).item() for step in range(3)], engine.full_state_dict()


def test_a_stage_that_calls_a_split_part_of_another_stages_block(ranks):
    split = find_tensor_plan(_build(), 2, inputs=_batch(0)[0]).plan.to_dict()
    assert {"condition", "blocks.0.embed.0", "blocks.0.embed.2", "blocks.0.shared.0"} <= split.keys()
    for rank, (losses, state) in enumerate(ranks(4, _train, dict(tp=2, pp=2, micro_batches=2))):
        model = _build()
        steps = [[_batch(step)] for step in range(3)]
        expected = list(plain_loop(model, ADAMW(model.parameters()), steps, loss_fn=nn.functional.mse_loss))
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        if rank == 0:
            parity.assert_same_state(state, model.state_dict(), 1e-10)
