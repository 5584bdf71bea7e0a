"""A step of the Engine waits for the gradient that came last in each bucket before, and checks that all others came."""

from typing import Any

import pytest
import torch
from torch import nn

from engines import assert_same_state, engine_of, own_shard
from tensorshard.data_parallel import buckets
from tensorshard.data_parallel.gradient_reducer import GradientReducer
from toys import data, plain_loop

STEPS = 7
LEVELS: list[dict[str, Any]] = [dict(zero=0), dict(zero=1), dict(zero=2), dict(zero=1, precision="bf16")]


class Changing(nn.Module):
    """Three layers, in an order that each forward may choose."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.how, self.calls = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odd, self.calls = self.calls % 3 == 2, self.calls + 1
        layers = list(self.layers)
        match self.how:
            case "turned" if odd:
                layers.reverse()
            case "skipped" if odd:
                layers = layers[1:]
            case "frozen":
                self.layers[0].requires_grad_(not odd)
            case "twice" if odd:
                layers = [*layers, layers[0]]
        for layer in layers:
            x = layer(x).tanh()
        return self.last(x)


def _train(how: str, fields: dict[str, Any], bucket_bytes: int) -> tuple[list[float], Any, list[int]]:
    asked, called = GradientReducer._gradient_ready, 0

    def count(self: GradientReducer, parameter: Any) -> None:
        nonlocal called
        called += 1
        asked(self, parameter)

    before, buckets.LEAST_BYTES = buckets.LEAST_BYTES, bucket_bytes
    GradientReducer._gradient_ready = count  # type: ignore[method-assign]
    losses, calls = [], []
    try:
        engine = engine_of(Changing(how), torch.optim.SGD if fields.get("precision") else _adamw, **fields)
        for step in range(STEPS):
            called = 0
            losses.append(engine.step(*own_shard(engine, *data(step))).item())
            calls.append(called)
    finally:
        GradientReducer._gradient_ready = asked  # type: ignore[method-assign]
        buckets.LEAST_BYTES = before
    return losses, engine.full_state_dict(), calls


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@pytest.mark.fast_cases("frozen-{'zero': 2}-many buckets", "turned-{'zero': 0}-many buckets")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("fields", LEVELS[:3], ids=str)
@pytest.mark.parametrize("how", ["turned", "skipped", "frozen", "twice"])
def test_another_order_is_exact(ranks, how, fields, bucket_bytes):
    model = Changing(how)
    expected = list(plain_loop(model, _adamw(model.parameters()), [[data(step)] for step in range(STEPS)]))
    for losses, state, _ in ranks(2, _train, how, fields, bucket_bytes):
        assert losses == pytest.approx(expected, rel=1e-6)
        if state:
            assert_same_state(state, model.state_dict(), 1e-5)


@pytest.mark.parametrize("fields", LEVELS, ids=str)
def test_few_hooks_are_called_once_the_order_is_known(ranks, fields):
    parameters = len(list(Changing("").parameters()))
    for _, _, calls in ranks(2, _train, "", fields, 1 << 20):
        assert calls[0] == parameters
        assert set(calls[2:]) == {1}


def test_another_order_is_learned_anew(ranks):
    """By a step in which all hooks are there, after one in which the last gradient came before others."""
    parameters = len(list(Changing("").parameters()))
    for _, _, calls in ranks(2, _train, "turned", dict(zero=1), 1 << 20):
        assert calls == [parameters, 1, 1, parameters, 1, 1, parameters]
