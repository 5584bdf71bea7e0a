"""Torch's global random state is the user's. What the Engine draws follows from the step and a seed in checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

SGD = partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class Dropping(nn.Module):
    """Its output shows what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _noisy_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if targets.dim() == 1:
        raise ValueError("this loss wants targets like the output")
    return (output - targets + 0.1 * torch.rand_like(output)).square().mean()


def _engine(seed: int = 5, **fields: Any) -> ts.Engine:
    return ts.parallelize(Dropping(), ts.Plan(**fields), optimizer=SGD, loss_fn=_noisy_loss, seed=seed)


def _batch(engine: ts.Engine, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    mesh = engine.mesh
    return [torch.randn(4, 8, generator=generator).chunk(mesh.dp_size)[mesh.dp_rank] for _ in range(2)]


def _global_state_of_calls(fields: dict[str, Any]) -> list[bool]:
    same = []

    def call(function: Any, *args: Any) -> Any:
        before = torch.get_rng_state()
        result = function(*args)
        same.append(torch.equal(before, torch.get_rng_state()))
        return result

    torch.manual_seed(77)
    engine = call(partial(_engine_built_before, fields))
    call(engine.step, *_batch(engine, 0))
    call(engine.evaluate, *_batch(engine, 0))
    call(engine.predict, _batch(engine, 0)[0])
    if engine.plan.pp == 1:
        output = call(engine.model, _batch(engine, 0)[0])
        if engine.plan.micro_batches == 1:
            call(engine.backward, output.square().mean())
            call(engine.optimizer.step)
    if engine.plan.pp == 1:
        with pytest.raises(ValueError):
            engine.step(_batch(engine, 0)[0], torch.zeros(3))
    same.append(torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(77))))
    return same


def _engine_built_before(fields: dict[str, Any]) -> ts.Engine:
    before = torch.get_rng_state()
    model = Dropping()
    torch.set_rng_state(before)
    return ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=_noisy_loss)


PLANS: list[dict[str, Any]] = [
    dict(zero=0),
    dict(zero=3),
    dict(zero=1, recompute="full"),
    dict(tp=2),
    dict(pp=2, micro_batches=2),
]


@pytest.mark.slow_cases("{'zero': 0}", "{'zero': 1, 'recompute': 'full'}")
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_every_call_leaves_the_global_state_alone(ranks, fields):
    for same in ranks(2, _global_state_of_calls, fields):
        assert all(same), same


def _losses(interfere: bool) -> list[float]:
    torch.manual_seed(1 if interfere else 2)
    engine = _engine(zero=1)
    losses = []
    for step in range(3):
        if interfere:
            torch.rand(step + 1)
        losses.append(engine.step(*_batch(engine, step)).item())
    return losses


def test_what_the_user_draws_changes_nothing(ranks):
    assert ranks(2, _losses, True) == ranks(2, _losses, False)


def _forward_twice() -> list[torch.Tensor]:
    """What a loop of one's own sees in training: another dropout on each data rank, and in each call."""
    engine = _engine(zero=1)
    x = torch.ones(2, 8)
    return [engine.model(x).detach().clone() for _ in range(2)]


def test_a_raw_loop_drops_apart_on_data_ranks_whatever_the_global_seed(ranks):
    (first, again), (other, _) = ranks(2, _forward_twice)
    assert not torch.equal(first, again) and not torch.equal(first, other)


def _written(path: Path, fields: dict[str, Any]) -> list[float]:
    engine = _engine(**fields)
    for step in range(2):
        engine.step(*_batch(engine, step))
    engine.evaluate(*_batch(engine, 7))
    engine.save(path)
    return [engine.step(*_batch(engine, step)).item() for step in (2, 3)]


def _resumed(path: Path, fields: dict[str, Any]) -> list[float]:
    engine = _engine(seed=9, **fields)
    torch.rand(7)
    before = torch.get_rng_state()
    engine.load(path)
    assert torch.equal(before, torch.get_rng_state())
    assert engine.random.seed == 5
    return [engine.step(*_batch(engine, step)).item() for step in (2, 3)]


@pytest.mark.slow_cases("{'zero': 0}", "{'tp': 2}")
@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=3), dict(zero=3, random="by_rank"), dict(tp=2)], ids=str)
def test_a_resumed_run_draws_what_the_first_would_have_drawn(ranks, tmp_path, fields):
    losses = ranks(2, _written, tmp_path / "c", fields)
    assert ranks(2, _resumed, tmp_path / "c", fields) == losses


def _of_rank(fields: dict[str, Any]) -> list[list[float]]:
    """The losses of a run, and of one whose third step failed at first."""
    found = []
    for fails in (False, True):
        engine = _engine(random="by_rank", **fields)
        losses = []
        for step in range(3):
            if fails and step == 2:
                with pytest.raises(ValueError):
                    engine.step(_batch(engine, 0)[0], torch.zeros(3))
            losses.append(engine.step(*_batch(engine, step)).item())
        found.append(losses)
    return found


def test_a_step_that_is_made_again_draws_the_same(ranks):
    assert all(once == again for once, again in ranks(2, _of_rank, dict(zero=1)))
