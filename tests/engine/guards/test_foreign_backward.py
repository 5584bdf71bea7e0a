"""Backwards that go through an Engine's model without training it: a generator's through its critic, attacks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity
import seeds
import tensorshard as ts
from engines import LEVELS

bce = nn.functional.binary_cross_entropy_with_logits
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
STEPS, SAMPLES = 3, 8


class Net(nn.Module):
    def __init__(self, inputs: int, outputs: int, recompute: bool = False) -> None:
        super().__init__()
        seeds.seed(inputs)
        self.first, self.last = nn.Linear(inputs, 32), nn.Linear(32, outputs)
        self.recompute = recompute

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=True) if self.recompute else self.hidden(x)
        return self.last(hidden)


def _data(step: int, part: int, kind: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 8 if kind else 16, generator=seeds.generator(100 * step + 10 * part + kind))


def _expected(parts: int) -> tuple[dict[str, torch.Tensor], ...]:
    generator, critic = Net(8, 16), Net(16, 1)
    train, judge = SGD(generator.parameters()), SGD(critic.parameters())
    for step in range(STEPS):
        for part in range(parts):
            real, fake = critic(_data(step, part, 0)), critic(generator(_data(step, part, 1)).detach())
            ((bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))) / parts).backward()
        judge.step()
        judge.zero_grad()
        for part in range(parts):
            fake = critic(generator(_data(step, part, 2)))
            (bce(fake, torch.ones_like(fake)) / parts).backward()
        train.step()
        train.zero_grad()
        judge.zero_grad()
    return generator.state_dict(), critic.state_dict()


def _engines(fields: dict[str, Any], recompute: bool = False) -> tuple[ts.Engine, ts.Engine]:
    return (
        ts.parallelize(Net(8, 16), ts.Plan(**fields), optimizer=SGD, loss_fn=bce),
        ts.parallelize(Net(16, 1, recompute), ts.Plan(**fields), optimizer=SGD, loss_fn=bce),
    )


def _adversaries(fields: dict[str, Any]) -> tuple:
    generator, critic = _engines(fields)
    parts = generator.plan.micro_batches
    share = slice(generator.mesh.dp_rank, None, generator.mesh.dp_size)
    for step in range(STEPS):
        for part in range(parts):
            real = critic.model(_data(step, part, 0)[share])
            fake = critic.model(generator.model(_data(step, part, 1)[share]).detach())
            critic.backward(bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake)))
        critic.optimizer.step()
        critic.optimizer.zero_grad()
        for part in range(parts):
            fake = critic.model(generator.model(_data(step, part, 2)[share]))
            generator.backward(bce(fake, torch.ones_like(fake)))
        generator.optimizer.step()
        generator.optimizer.zero_grad()
        critic.optimizer.zero_grad()
    return generator.full_state_dict(), critic.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(dict(micro_batches=2), marks=pytest.mark.slow),
        pytest.param(dict(precision="fp16"), marks=pytest.mark.slow),
        {},
    ],
    ids=str,
)
def test_adversaries_train_as_on_one_process(ranks, level, more):
    found = ranks(2, _adversaries, dict(zero=level, **more))[0]
    tolerance = 2e-2 if "precision" in more else 1e-5
    for state, expected in zip(found, _expected(more.get("micro_batches", 1)), strict=True):
        parity.assert_same_state(state, expected, tolerance)


def _attack(fields: dict[str, Any]) -> list[Any]:
    _, critic = _engines(fields)
    x = torch.randn(4, 16, generator=seeds.generator(0)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic.model(x).sum(), x)
    hidden = x * 2
    critic.model(2 * hidden).sum().backward(inputs=[x])
    weight_gradients = [p.grad for p in critic.model.parameters()]
    return [gradient, x.grad, weight_gradients]


def test_attacks_on_the_inputs_run(ranks):
    x = torch.randn(4, 16, generator=seeds.generator(0)).requires_grad_()
    (expected,) = torch.autograd.grad(Net(16, 1)(x).sum(), x)
    (other,) = torch.autograd.grad(Net(16, 1)(4 * x).sum(), x)
    for fields in (dict(zero=1, micro_batches=2), dict(zero=3, precision="fp16"), dict(zero=0, micro_batches=2)):
        gradient, second, others = ranks(2, _attack, fields)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(second, other, rtol=1e-2, atol=2e-3)
        assert others == [None] * 4


def _refusals(fields: dict[str, Any], recompute: bool) -> list[str]:
    generator, critic = _engines(fields, recompute)

    def backward() -> None:
        critic.model(torch.randn(4, 16, requires_grad=True)).sum().backward()

    def with_a_generators_gradient(call: Any) -> None:
        for _ in range(generator.plan.micro_batches):
            generator.backward(critic.model(generator.model(torch.randn(4, 8))).sum())
        call()

    found = []
    for call in (
        backward,
        partial(with_a_generators_gradient, critic.optimizer.step),
        partial(with_a_generators_gradient, lambda: critic.backward(critic.model(torch.randn(4, 16)).sum())),
    ):
        try:
            call()
            found.append("nothing")
        except RuntimeError as error:
            found.append(str(error))
        generator.optimizer.zero_grad()
        critic.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fields", [dict(zero=1, micro_batches=2), dict(zero=3, precision="fp16")], ids=str)
def test_gradients_that_would_train_are_refused(ranks, fields, recompute):
    for plain, update, more in ranks(2, _refusals, fields, recompute):
        assert plain.startswith("loss.backward() was called under a plan with")
        for message in (update, more):
            assert "another Engine's backward has added" in message and "engine.optimizer.zero_grad()" in message
