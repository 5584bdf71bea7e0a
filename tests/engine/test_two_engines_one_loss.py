"""Two models of two Engines, trained by one loss and one backward: the gradients of both are those of one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parity
import tensorshard as ts
from engines import own_shard

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)  # AdamW would hide a gradient that is twice as large


def _models() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Sequential(nn.Linear(12, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))]


def _batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8, 12, generator=generator), torch.randn(8, 6, generator=generator)]


def _train(fields: dict[str, Any], which: int) -> list[dict[str, torch.Tensor]]:
    engines = [ts.parallelize(m, ts.Plan(**fields), optimizer=SGD, loss_fn=F.mse_loss) for m in _models()]
    for step in range(3):
        x, y = own_shard(engines[0], *_batch(step))
        engines[which].backward(F.mse_loss(engines[1].model(engines[0].model(x)), y))
        for engine in engines:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return [engine.full_state_dict() for engine in engines]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=3)], ids=str)
def test_both_are_trained_as_on_one_process(ranks, fields, which):
    models = _models()
    optimizer = SGD([parameter for model in models for parameter in model.parameters()])
    for step in range(3):
        x, y = _batch(step)
        F.mse_loss(models[1](models[0](x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state, model in zip(ranks(2, _train, fields, which)[0], models, strict=True):
        parity.assert_same_state(state, model.state_dict(), 1e-5)
