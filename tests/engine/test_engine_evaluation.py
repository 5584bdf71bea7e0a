"""Evaluation leaves training as it was; dropout follows the seed."""

import pytest
import torch
from torch import nn

from engines import LEVELS, assert_same_state, engine_of, local, own_shard
from toys import data, squares


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.fixed = nn.BatchNorm1d(3).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.layers(x))


def _evaluate(level: int) -> tuple:
    engine = engine_of(Noisy(), zero=level, clip_grad_norm=1.0)
    engine.model.fixed.eval()
    inputs, targets = data(0)
    squares(engine.model(*own_shard(engine, inputs)), *own_shard(engine, targets)).backward()
    before = engine.full_state_dict()
    gradients = [local(p.grad).clone() for p in engine.sharded.masters().values()]
    random = torch.get_rng_state()
    found = engine.evaluate(*own_shard(engine, *data(1)))
    assert not found.requires_grad
    assert torch.equal(random, torch.get_rng_state())
    assert engine.step_count == 0 and engine.grad_norm is None
    assert all(torch.equal(local(p.grad), g) for p, g in zip(engine.sharded.masters().values(), gradients, strict=True))
    training = {name: module.training for name, module in engine.model.named_modules()}
    return found.item(), training, before, engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_leaves_the_state_of_training_alone(ranks, level):
    results = ranks(2, _evaluate, level)
    assert results[0][0] == results[1][0]
    loss, training, before, after = results[0]
    assert training.pop("fixed") is False and all(training.values())
    assert_same_state(after, before, 0.0)
    model = Noisy()
    model.load_state_dict(after)
    assert loss == pytest.approx(squares(model.eval()(data(1)[0]), data(1)[1]).item(), rel=1e-5)


def _noise(seed: int) -> list[float]:
    engine = engine_of(Noisy(), zero=3, seed=seed)
    inputs, targets = data(0)
    outputs = [engine.model(inputs).sum().item()]  # the same samples on both ranks
    return [*outputs, engine.step(*own_shard(engine, inputs, targets)).item()]


@pytest.mark.slow
def test_dropout_differs_between_data_ranks_and_repeats_with_the_seed(ranks):
    first, again, other = ranks(2, _noise, 0), ranks(2, _noise, 0), ranks(2, _noise, 1)
    assert first == again
    assert first[0][0] != first[1][0]
    assert first[0][1] == first[1][1]
    assert first[0] != other[0]
