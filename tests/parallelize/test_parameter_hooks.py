"""Hooks that a constructor registers on parameters are called under every plan, as on one process."""

from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from engines import ADAMW, own_shard
from toys import data, squares


class Hooked(nn.Module):
    """Scales, clamps and masks the gradients of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.inner, self.outlet = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.inlet.weight.register_hook(lambda gradient: gradient * 0.1)
        self.inner.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.outlet.weight.register_post_accumulate_grad_hook(_mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(torch.tanh(self.inner(torch.tanh(self.inlet(x)))))


def _mask(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(torch.arange(16.0))


def _train(fields: dict[str, Any], is_built: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = Hooked() if is_built else Hooked
    sample = data(0)[0][:2]
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=squares, sample_inputs=sample)
    initial = {name: value.clone() for name, value in engine.full_state_dict().items()}
    for step in range(3):
        engine.step(*own_shard(engine, *data(step)))
    return initial, engine.full_state_dict()


PLANS = [dict(zero=1), dict(zero=3), dict(tp=2), dict(pp=2, micro_batches=2), dict(zero=2, micro_batches=2)]


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_gradients_are_changed_as_on_one_process(ranks, fields, is_built):
    initial, state = ranks(2, _train, fields, is_built)[0]
    model = Hooked()
    model.load_state_dict(initial)
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        squares(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    parity.assert_same_state(state, model.state_dict(), 1e-5)
