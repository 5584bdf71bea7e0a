"""Optimizers that look at whole tensors are exact under a plan, or refused before anything trains."""

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import seeds
import tensorshard as ts
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.guards.optimizer_probe import check_optimizer
from tensorshard.engine.optimizer import build_optimizer


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            u = p.grad
            if p.ndim == 2:
                u = u / u.norm()
                for _ in range(5):
                    u = 1.5 * u - 0.5 * u @ u.t() @ u if len(u) <= u.size(1) else 1.5 * u - 0.5 * u @ (u.t() @ u)
            p.add_(u, alpha=-0.02)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * (0.05 * p.norm() / (p.grad.norm() + 1e-6)))


class Elementwise(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), which a loop of one's own may bring."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(torch.tanh(average * 0.9 + p.grad * 0.1), alpha=0.01)
                average.lerp_(p.grad, 0.01)


class Prodigious(torch.optim.Optimizer):
    """Its rate follows from all parameters together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        rate = 0.1 / sum(p.grad.abs().sum() for p in trained)
        for p in trained:
            p.sub_(p.grad * rate)


ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2)


def train(make: Any, fields: dict[str, Any]) -> Any:
    seeds.seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Linear(16, 4))
    alone = copy.deepcopy(model)
    try:
        engine = ts.parallelize(model, ts.Plan(**fields), optimizer=make, loss_fn=nn.functional.cross_entropy)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    optimizer, share = make(alone.parameters()), slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
        nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step(x[share], y[share])
    full = engine.full_state_dict()
    return max(((full[n] - w).abs().max().item() for n, w in alone.state_dict().items()), default=0.0) if full else 0.0


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (Muon, dict(zero=1)),
        (Lamb, dict(zero=3)),
        (Elementwise, dict(zero=1)),
        (Elementwise, dict(tp=2)),
        (ADAFACTOR, dict(zero=0)),
    ],
    ids=str,
)
def test_exact(ranks, make, fields):
    assert ranks(2, train, make, fields)[0] < 2e-5


@pytest.mark.parametrize("make", [Muon, Lamb, ADAFACTOR, Prodigious], ids=str)
def test_what_couples_elements_is_refused_under_tp(ranks, make):
    for message in ranks(2, train, make, dict(tp=2)):
        assert message.startswith("UnsuitableOptimizerError: tp=2") and "couples a tensor's elements" in message
        assert "AdamW" in message and "zero=1 to 3" in message


@pytest.mark.parametrize("zero", [1, 3])
def test_what_dtensors_cannot_do_is_refused(ranks, zero):
    for message in ranks(2, train, ADAFACTOR, dict(zero=zero)):
        assert message.startswith(f"UnsuitableOptimizerError: zero={zero}") and "zero=0" in message


def seconds_of_probe() -> float:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])
    engine = ts.parallelize(model, ts.Plan(tp=2), optimizer=Elementwise, loss_fn=nn.functional.mse_loss)
    sharded: ShardedModel = engine.sharded
    build = partial(build_optimizer, Elementwise)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        check_optimizer(engine.optimizer, build, sharded.masters(), sharded.split, 0, engine.mesh.world_group)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_it_costs_little(ranks):
    assert min(ranks(2, seconds_of_probe)) < 0.05 * 3  # 0.02 to 0.03 s, if the machine is not busy
