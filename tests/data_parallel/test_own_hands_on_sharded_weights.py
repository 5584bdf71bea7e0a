"""ZeRO 3 where a loop of one's own reads, writes and differentiates by parameters: the numbers of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import parity
import seeds
from engines import engine_of, own_shard
from toys import data, squares

STEPS = 4
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Net(nn.Module):
    def __init__(self, seed: int = 4) -> None:
        super().__init__()
        seeds.seed(seed)
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x)) * self.scale


class Case:
    """What a scenario works with: an Engine's model or a plain one."""

    def __init__(self, model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]) -> None:
        self.model, self.optimizer, self.backward = model, optimizer, backward
        self.kept: dict[str, Any] = {}

    def update(self, loss: torch.Tensor) -> None:
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.update(squares(self.model(x), y))


def _named_parts(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.update(squares(case.model.head(case.model.encode(x)), y))


def _parts_of_parts(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    model = case.model
    with torch.no_grad():
        target = model.blocks[1](model.inlet(x))
    h = model.blocks[0](model.inlet(x))
    case.update(squares(model.blocks[2][2](torch.relu(model.blocks[2][0](h))), target) + squares(model(x), y))


def _part_before_the_whole(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.update(squares(case.model(case.model.blocks[0](x)), y))


def _weight_by_hand(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    model = case.model
    h = model.encode(x)
    case.update(squares(F.linear(h, F.normalize(model.head.weight, dim=1), model.head.bias), y))


def _orthogonality(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    weights = [w for w in case.model.parameters() if w.ndim == 2]
    penalty = sum((w.t() @ w - torch.eye(w.size(1))).square().sum() for w in weights)
    case.update(squares(case.model(x), y) + 0.01 * penalty)


def _distance_to_the_first(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    old = case.kept.setdefault("old", [p.detach().clone() for p in case.model.parameters()])
    penalty = sum((p - o).square().sum() for p, o in zip(case.model.parameters(), old, strict=True))
    case.update(squares(case.model(x), y) + 0.1 * penalty)


def _flat_l1(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = torch.cat([p.flatten() for p in case.model.parameters()]).abs().mean()  # before the forward
    case.update(squares(case.model(x), y) + penalty)


def _clamp(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.plain_step(x, y)
    with torch.no_grad():
        for p in case.model.parameters():
            p.clamp_(-0.2, 0.2)


def _many_writes(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.plain_step(x, y)
    model = case.model
    generator = seeds.generator(3)
    with torch.no_grad():
        model.head.weight.copy_(0.1 * torch.randn(3, 6, generator=generator))
        model.head.bias.add_(torch.tensor(0.5))
        model.inlet.weight.mul_(torch.linspace(0.5, 1, 6))  # broadcast
        model.blocks[0][0].weight[2] = 0.25
        model.blocks[0][0].weight[3].mul_(0.5)
        model.blocks[0][0].weight[:, 1].add_(torch.tensor(0.1))
        model.blocks[0][0].weight.view(-1)[4:9] *= 0.5
        model.blocks[0][0].weight.t()[0].clamp_(-0.1, 0.1)
        model.blocks[1][0].weight /= model.blocks[1][0].weight.norm(dim=1, keepdim=True)
        model.blocks[2][0].weight.masked_fill_(torch.eye(7, 6) > 0, 0.0)
    model.blocks[0][2].weight.data.mul_(0.9)
    model.blocks[1][2].weight.data = torch.full((6, 7), 0.1)
    model.blocks[2][2].weight.data.copy_(torch.full((6, 7), 0.05))
    seeds.seed(5)
    nn.init.orthogonal_(model.blocks[1][0].weight, gain=0.3)
    nn.init.zeros_(model.blocks[0][0].bias)
    nn.init.normal_(model.blocks[0][2].bias, std=0.1)
    nn.init.xavier_uniform_(model.blocks[0][2].weight)


def _write_after_a_forward_without_backward(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.model(x)
    with torch.no_grad():
        for p in case.model.parameters():
            p.mul_(0.9)
    case.plain_step(x, y)


def _swap_in_an_average(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    model = case.model
    average = case.kept.setdefault("average", {n: p.detach().clone() for n, p in model.named_parameters()})
    case.plain_step(x, y)
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p, alpha=0.1)
            p.copy_(average[name] if p.ndim == 2 else p.lerp(average[name], 0.5))


def _sam(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.backward(squares(case.model(x), y))
    parameters = list(case.model.parameters())
    with torch.no_grad():
        norm = sum(p.grad.square().sum() for p in parameters).sqrt()
        steps = [p.grad * 0.05 / norm for p in parameters]
        for p, e in zip(parameters, steps, strict=True):
            p.add_(e)
    case.optimizer.zero_grad()
    case.backward(squares(case.model(x), y))
    with torch.no_grad():
        for p, e in zip(parameters, steps, strict=True):
            p.sub_(e)
    case.optimizer.step()
    case.optimizer.zero_grad()


def _slope(case: Case, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(case.model(x).sum(), x, create_graph=True)
    return slope


def _gradient_penalty(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    scores = case.model(x)
    case.update(squares(scores, y) + (_slope(case, x).norm(dim=1) - 1).square().mean() + case.model(x + 1).mean())


def _penalty_alone(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.update(_slope(case, x).square().mean())


def _twice_through_a_penalty(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    slope = _slope(case, x)
    x = x.clone().requires_grad_()
    (second,) = torch.autograd.grad(_slope_of(case, x).sum(), x, create_graph=True)
    case.update(second.square().mean() + slope.mean() + squares(case.model(x), y))


def _slope_of(case: Case, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(case.model(x).square().sum(), x, create_graph=True)[0]


def _forces_without_a_backward(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    _slope(case, x)
    case.plain_step(x, y)
    _slope(case, x)
    with torch.no_grad():
        case.model(x)


def _two_tasks(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    output, parameters = case.model(x), list(case.model.parameters())
    first = torch.autograd.grad(squares(output, y), parameters, retain_graph=True)
    second = torch.autograd.grad(squares(output, y + 1), parameters)
    dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    share = float(dot / sum(b.square().sum() for b in second))
    for p, a, b in zip(parameters, first, second, strict=True):
        p.grad = a - share * b if dot < 0 else a + b
    case.optimizer.step()
    case.optimizer.zero_grad()


def _gradients_by_hand(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    """This rank's whole gradients, as from a rule of the user's."""
    parameters = list(case.model.parameters())
    factor = squares(case.model(x), y).item()
    for p in parameters:
        p.grad = torch.full(p.shape, factor)
    case.optimizer.step()
    case.optimizer.zero_grad()


def _other_weights(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    model = case.model
    zeros = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    assert functional_call(model, zeros, (x,)).abs().max() == 0
    assert functional_call(model, {n: torch.zeros_like(p) for n, p in model.named_parameters()}, (x,)).abs().max() == 0
    half = {n: 0.5 * p for n, p in model.named_parameters()}
    case.update(squares(functional_call(model, half, (x,)), y))
    case.plain_step(x, y)


def _another_head(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    given = {"blocks.1.0.weight": torch.ones(7, 6), "head.weight": torch.ones(3, 6)}
    case.update(squares(functional_call(case.model, given, (x,)), y))


def _reentrant(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    model = case.model
    h = model.inlet(x)
    for _ in range(3):
        for block in model.blocks:
            h = h + checkpoint(block, h, use_reentrant=True)
    case.update(squares(model.head(h), y))


def _cached_gradients(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    """GradCache: representations first, and the encoder's backward in parts."""
    with torch.no_grad():
        parts = [case.model(part) for part in x.chunk(2)]
    together = torch.cat(parts).requires_grad_()
    squares(together, y).backward()
    for part, gradient in zip(x.chunk(2), together.grad.chunk(2), strict=True):
        output = case.model(part)
        case.backward((output * gradient).sum())
    case.optimizer.step()
    case.optimizer.zero_grad()


def _two_losses(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    output = case.model(x)
    squares(output, y).backward(retain_graph=True)
    output.square().mean().backward()
    case.optimizer.step()
    case.optimizer.zero_grad()


def _frozen_for_a_call(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    case.model.blocks[1].requires_grad_(False)
    case.model.head.requires_grad_(False)
    case.plain_step(x, y)
    case.model.requires_grad_(True)


SCENARIOS = [
    _named_parts, _parts_of_parts, _part_before_the_whole, _weight_by_hand,
    _orthogonality, _distance_to_the_first, _flat_l1,
    _clamp, _many_writes, _write_after_a_forward_without_backward, _swap_in_an_average, _sam,
    _gradient_penalty, _penalty_alone, _twice_through_a_penalty, _forces_without_a_backward,
    _two_tasks, _gradients_by_hand, _other_weights, _another_head,
    _reentrant, _cached_gradients, _two_losses, _frozen_for_a_call,
]  # fmt: skip


def _run(scenario: Callable[..., None], fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(Net(), optimizer=SGD, **fields)
    case = Case(engine.model, engine.optimizer, engine.backward)
    for step in range(STEPS):
        scenario(case, *own_shard(engine, *data(step)))
    return engine.full_state_dict()


def _alone(scenario: Callable[..., None]) -> dict[str, torch.Tensor]:
    model = Net()
    case = Case(model, SGD(model.parameters()), lambda loss: loss.backward())
    for step in range(STEPS):
        scenario(case, *data(step))
    return model.state_dict()


def _name(value: Any) -> str:
    return value.__name__.strip("_") if callable(value) else str(value)


@pytest.mark.fast_cases("named_parts-{}")
@pytest.mark.parametrize("fields", [dict(), pytest.param(dict(dp_replicate=2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=_name)
def test_the_numbers_of_one_process(ranks, scenario, fields):
    size = 4 if "dp_replicate" in fields else 2
    if scenario in (_cached_gradients,) and size == 4:
        pytest.skip("its parts are of two samples")
    state = ranks(size, _run, scenario, dict(zero=3, **fields))[0]
    parity.assert_same_state(state, _alone(scenario), 2e-5)
