"""Selective recomputation keeps results of split layers as sums over the ranks, and no result that backward leaves."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import seeds
import tensorshard as ts
from parity import assert_same_state
from tensorshard.models import GPT, next_token_loss
from tensorshard.torch_private.dispatch import TorchDispatchMode

SAMPLES, LENGTH, WIDTH, LAYERS = 4, 256, 64, 6


def _estimated(**fields: Any) -> Any:
    plan = ts.Plan(**fields)
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    estimate = ts.estimate(
        partial(GPT, vocab_size=32, context_length=LENGTH, num_layers=LAYERS, num_heads=4, width=WIDTH),
        plan,
        world_size=plan.tp,
        inputs=tokens,
        targets=tokens,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=next_token_loss,
    )
    return estimate.ranks[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence_parallel", "collective"),
    [
        pytest.param(False, "all_reduce", id="whole", marks=pytest.mark.slow),
        pytest.param(True, "reduce_scatter", id="shards"),
    ],
)
def test_no_product_and_no_sum_over_ranks_is_computed_again(sequence_parallel, collective):
    none, selective, full = (
        _estimated(tp=2, sequence_parallel=sequence_parallel, recompute=mode) for mode in ("none", "selective", "full")
    )
    assert selective.flops == none.flops < full.flops
    sent = [rank.traffic["tp"][collective].nbytes for rank in (none, selective, full)]
    assert sent[0] == sent[1] < sent[2]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_a_block_keeps_its_input_and_all_products_but_the_last(fields):
    split = fields.get("tp", 1)
    whole = split if fields.get("sequence_parallel") else 1
    one = SAMPLES * LENGTH * WIDTH * 4
    # Queries, keys and values, attention, the layer up; the input, and the layer after attention.
    kept = LAYERS * (8 * one / split + 2 * one / whole)
    activations = _estimated(recompute="selective", **fields).by_category["activations"]
    # At the peak, when the last block is computed again, some of its results are taken already.
    assert kept - 2 * one / whole <= activations <= kept + one / whole


class Watching(TorchDispatchMode):
    """Sees operations before the mode of recomputation does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Does something with what its last layer returns."""

    def __init__(self, end: str, frozen: bool) -> None:
        super().__init__()
        self.end = end
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.up.requires_grad_(not frozen)
        self.down.requires_grad_(not frozen)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Watching() if self.end == "watched" else nullcontext():
            result = self.down(torch.relu(self.up(x)))
        if self.end == "in place":
            result.mul_(2.0)
        if self.end == "norm":
            return self.norm(x + result)
        if self.end in ("scaled", "watched"):
            return x + self.scale * result
        return result.add_(x)


class Net(nn.Module):
    def __init__(self, end: str, frozen: bool) -> None:
        super().__init__()
        seeds.seed(4)
        self.blocks = nn.ModuleList(Block(end, frozen) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x.mul_(0.5) if block.end == "changed later" else x
        return self.head(x)


OPTIMIZER = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STEPS = 4


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeds.generator(30 + step)
    return torch.randn(6, 7, 8, generator=generator), torch.randn(6, 7, 5, generator=generator)


def _train(end: str, frozen: bool, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = ts.parallelize(
        Net(end, frozen),
        ts.Plan(recompute="selective", **fields),
        optimizer=OPTIMIZER,
        loss_fn=_loss,
        sample_inputs=_batch(0)[0],
    )
    for step in range(STEPS):
        engine.step(*_batch(step))
    return engine.full_state_dict()


def _alone(end: str, frozen: bool) -> dict[str, torch.Tensor]:
    model = Net(end, frozen)
    optimizer = OPTIMIZER([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        inputs, targets = _batch(step)
        optimizer.zero_grad()
        _loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.fast_cases("added-trained-whole")
@pytest.mark.parametrize("fields", [{}, {"sequence_parallel": True}], ids=["whole", "shards"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("end", ["added", "scaled", "norm", "in place", "changed later", "watched"])
def test_whatever_follows_the_last_layer(ranks, end, frozen, fields):
    found = ranks(2, _train, end, frozen, {"tp": 2, **fields})[0]
    assert_same_state(found, ranks(1, _alone, end, frozen)[0], 1e-5)
