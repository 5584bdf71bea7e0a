"""Learning rate schedules."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from tensorshard.trainer.schedulers import constant, warmup_cosine, warmup_linear


def _optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def _rates(scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def test_warmup_cosine_rises_to_the_peak_and_falls_to_the_floor() -> None:
    schedule = warmup_cosine(_optimizer(0.4), warmup_steps=4, total_steps=12, min_ratio=0.25)
    rates = _rates(schedule, 14)
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[8] == pytest.approx((0.4 + 0.1) / 2)
    assert rates[11] == pytest.approx(0.1 + 0.3 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert rates[12:] == pytest.approx([0.1, 0.1])


def test_warmup_linear_is_straight() -> None:
    rates = _rates(warmup_linear(_optimizer(1.0), warmup_steps=2, total_steps=6), 7)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_run_shorter_than_its_warmup_ends_on_the_way_up() -> None:
    rates = _rates(warmup_cosine(_optimizer(1.0), warmup_steps=10, total_steps=3), 3)
    assert rates == pytest.approx([0.1, 0.2, 0.3])


def test_constant_stays_at_the_peak() -> None:
    assert _rates(constant(_optimizer(1.0), warmup_steps=2), 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert _rates(constant(_optimizer(1.0)), 2) == [1.0, 1.0]


def test_each_parameter_group_keeps_its_own_peak() -> None:
    schedule = warmup_cosine(_optimizer(1.0, 0.1), warmup_steps=2, total_steps=4)
    assert schedule.get_last_lr() == pytest.approx([0.5, 0.05])


def test_a_longer_schedule_continues_where_a_resumed_run_stands() -> None:
    short = warmup_cosine(_optimizer(1.0), warmup_steps=0, total_steps=4)
    _rates(short, 2)
    long = warmup_cosine(_optimizer(1.0), warmup_steps=0, total_steps=8)
    undisturbed = _rates(warmup_cosine(_optimizer(1.0), warmup_steps=0, total_steps=8), 4)
    long.load_state_dict(short.state_dict())
    long.optimizer.step()
    long.step()
    assert long.get_last_lr()[0] == pytest.approx(undisturbed[3])


@pytest.mark.parametrize("schedule", [warmup_cosine, warmup_linear])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": -1, "total_steps": 4}, "warmup_steps is -1"),
        ({"warmup_steps": 0, "total_steps": 0}, "total_steps is 0"),
        ({"warmup_steps": 0, "total_steps": 4, "min_ratio": 1.5}, "min_ratio is 1.5"),
    ],
)
def test_impossible_schedules_are_refused(
    schedule: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(_optimizer(1.0), **arguments)
