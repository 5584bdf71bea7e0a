"""Parameters of a pipeline that are frozen and unfrozen between steps."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

PLANS = [
    dict(pp=2, zero=0, micro_batches=2),
    dict(pp=2, zero=0, micro_batches=4, pp_schedule="interleaved_1f1b"),
    dict(pp=2, zero=0, micro_batches=4, pp_schedule="zbv"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(12, (8, 5), generator=generator), torch.randint(12, (8, 5), generator=generator)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _freeze(model: nn.Module, names: tuple[str, ...], frozen: bool) -> None:
    for name in names:
        model.get_submodule(name).requires_grad_(not frozen)


def _freeze_by_lists(model: nn.Module, names: tuple[str, ...], frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            parameter.requires_grad = not frozen


def _made(first: tuple[str, ...]) -> Net:
    torch.manual_seed(0)
    model = Net()
    _freeze(model, first, True)
    return model


def _frozen_in_turn(fields: dict[str, Any], freeze: Any) -> dict[str, torch.Tensor]:
    engine = ts.parallelize(_made(()), ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.3), loss_fn=_loss)
    for step, names in enumerate(
        [("blocks.0",), ("embedding", "blocks.1"), ("embedding", "blocks.1", "blocks.2", "blocks.3"), ()]
    ):
        freeze(engine.model, names, True)
        engine.step(*_batch(step))
        freeze(engine.model, names, False)
    return engine.full_state_dict()


@pytest.mark.parametrize("freeze", [_freeze, pytest.param(_freeze_by_lists, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_freezing_stops_updates(ranks, fields, freeze):
    model = _made(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step, names in enumerate(
        [("blocks.0",), ("embedding", "blocks.1"), ("embedding", "blocks.1", "blocks.2", "blocks.3"), ()]
    ):
        _freeze(model, names, True)
        loss = _loss(model(_batch(step)[0]), _batch(step)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _freeze(model, names, False)
    found = ranks(2, _frozen_in_turn, fields, freeze)[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-5)


FIRST = ("embedding", "blocks.0", "blocks.1", "blocks.2")


def _unfrozen(fields: dict[str, Any], freeze: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The gradients of the step after the first layers were unfrozen, and all losses."""
    engine = ts.parallelize(_made(FIRST), ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.3), loss_fn=_loss)
    losses = [engine.step(*_batch(0)).item()]
    freeze(engine.model, FIRST, False)
    gradients: dict[str, torch.Tensor] = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in engine.model.named_parameters()})
    )
    losses.append(engine.step(*_batch(1)).item())
    return gradients, losses


@pytest.mark.parametrize("freeze", [pytest.param(_freeze, marks=pytest.mark.slow), _freeze_by_lists])
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_what_is_unfrozen_gets_its_gradient(ranks, fields, freeze):
    model = _made(FIRST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(2):
        loss = _loss(model(_batch(step)[0]), _batch(step)[1])
        losses.append(loss.item())
        loss.backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
            _freeze(model, FIRST, False)
    results = ranks(2, _unfrozen, fields, freeze)
    seen = set()
    for gradients, found in results:
        assert found == pytest.approx(losses, rel=2e-5)
        for name, gradient in gradients.items():
            seen.add(name)
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=2e-5, atol=2e-5)
    assert seen == {name for name, _ in model.named_parameters()}
