"""Forward hooks of the user's on split layers: they see whole features, and may return others."""

from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from engines import ADAMW, own_shard
from toys import data

NAMES = ("blocks.0.up", "blocks.1.down", "blocks.1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet, self.blocks, self.outlet = nn.Linear(6, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class Hooked:
    """Collects what layers get and return, and weighs the features of two layers by their places."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        for name in NAMES:
            model.get_submodule(name).register_forward_hook(self._collecting(name))
        model.get_submodule("blocks.1.up").register_forward_hook(lambda m, a, o: o * _weights(o))
        model.get_submodule("blocks.0.down").register_forward_pre_hook(lambda m, a: a[0] * _weights(a[0]))
        model.get_submodule("blocks.1.down").register_forward_pre_hook(
            lambda m, a, k: ((a[0] * _weights(a[0]),), k), with_kwargs=True
        )

    def _collecting(self, name: str) -> Any:
        def collect(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.inputs[name], self.outputs[name] = args[0], output

        return collect

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        features = [self.outputs["blocks.0.up"], self.inputs["blocks.1.down"], self.outputs["blocks.1"]]
        return (output - targets).square().mean() + sum((f - _weights(f)).square().mean() for f in features)


def _weights(features: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, features.size(-1))


def _train(fields: dict[str, Any], before: bool) -> dict[str, torch.Tensor]:
    model = Net()
    hooked = [Hooked(model)] if before else []

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return hooked[0].loss(output, targets)

    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, sample_inputs=data(0)[0])
    hooked += [] if before else [Hooked(engine.model)]
    for step in range(3):
        engine.step(*own_shard(engine, *data(step)))
    assert hooked[0].outputs["blocks.0.up"].shape[-1] == hooked[0].inputs["blocks.1.down"].shape[-1] == 32
    return engine.full_state_dict()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fields", [dict(tp=2), dict(tp=2, recompute="full"), dict(zero=3)], ids=str)
def test_features_are_those_of_one_process(ranks, fields, before):
    model = Net()
    hooked, optimizer = Hooked(model), ADAMW(model.parameters())
    for step in range(3):
        x, y = data(step)
        hooked.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    parity.assert_same_state(ranks(2, _train, fields, before)[0], model.state_dict(), 1e-5)
