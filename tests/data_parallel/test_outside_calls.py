"""ZeRO 3 where a model calls a part of a block from outside of it, or reads its weight."""

from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
from engines import ADAMW, engine_of, own_shard
from toys import data, plain_loop


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return x + self.mix(torch.tanh(x)) * self.embed(inputs)


class Diffuser(nn.Module):
    """Its last layer is conditioned on what the first block's embedding makes of the input, as in a DiT."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        seeds.seed(4)
        self.blocks, self.last = nn.ModuleList(Conditioned() for _ in range(3)), nn.Linear(6, 3)
        self.reads = reads

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs
        for block in self.blocks:
            x = block(x, inputs)
        if self.reads:
            return self.last(nn.functional.linear(x, self.blocks[0].mix.weight))
        return self.last(x * self.blocks[0].embed(inputs) + self.blocks[1].embed[0](inputs).mean(1, keepdim=True))


def _train(reads: bool, fields: dict[str, Any]) -> tuple:
    engine = engine_of(Diffuser(reads), **fields)
    evaluated = engine.evaluate(*own_shard(engine, *data(0))).item()  # the first forward has no backward
    losses = [engine.step(*own_shard(engine, *data(step))).item() for step in range(3)]
    return evaluated, losses, engine.full_state_dict()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("fields", [dict(micro_batches=2), dict(dp_replicate=2)], ids=str)
def test_a_part_of_a_block_that_is_used_from_outside(ranks, fields, reads):
    evaluated, losses, state = ranks(4 if "dp_replicate" in fields else 2, _train, reads, dict(zero=3, **fields))[0]
    model = Diffuser(reads)
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(3)]))
    assert evaluated == pytest.approx(expected[0], rel=1e-5)
    assert losses == pytest.approx(expected, rel=1e-5)
    parity.assert_same_state(state, model.state_dict(), 1e-5)
