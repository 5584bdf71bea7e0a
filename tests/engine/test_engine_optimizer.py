"""What the optimizer is given, and what it does with groups and schedules."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from engines import ADAMW, LEVELS, assert_same_state, engine_of, own_shard
from tensorshard.torch_private.dispatch import TorchDispatchMode, has_dispatch_mode
from tensorshard.torch_private.operators import FUSED_UPDATES
from toys import Regular, data, plain_loop


def _by_dimension(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)  # far above what gradients of almost zero are off by rounding


def _by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for n, p in named_parameters if "norm" not in n]},
        {"params": [p for n, p in named_parameters if "norm" in n], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.3)


def _with_schedule(factory: Any, level: int) -> tuple:
    engine = engine_of(Regular(), factory, zero=level)
    scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        engine.step(*own_shard(engine, *data(step)))
        scheduler.step()
    return engine.full_state_dict(), [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("factory", [_by_dimension, _by_name])
def test_parameter_groups_and_schedules(ranks, level, factory):
    state, rates = ranks(2, _with_schedule, factory, level)[0]
    model = Regular()
    given = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = factory(given if factory is _by_name else [p for _, p in given])
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        list(plain_loop(model, optimizer, [[data(step)]]))
        scheduler.step()
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert_same_state(state, model.state_dict())


def _kernels() -> list[Any]:
    choices = [{}, {"foreach": False}, {"fused": False}, {"foreach": True}, {"fused": True}]
    engines = [engine_of(Regular(), partial(torch.optim.AdamW, **choice)) for choice in choices]
    for engine in engines:
        engine.step(*own_shard(engine, *data(0)))
    return [(group["fused"], group["foreach"]) for engine in engines for group in engine.optimizer.param_groups]


def test_a_fused_optimizer_is_chosen_only_where_the_choice_was_left_open(ranks):
    assert ranks(1, _kernels)[0] == [(True, None), (None, False), (False, None), (None, True), (True, None)]


def _attributes(level: int, precision: str) -> list[Any]:
    model = Regular()
    model.wide.weight.no_decay = "yes"
    seen: list[Any] = []

    def factory(named_parameters):
        seen.extend((name, tuple(p.shape), p.no_decay) for name, p in named_parameters if hasattr(p, "no_decay"))
        return ADAMW([p for _, p in named_parameters])

    engine_of(model, factory, zero=level, precision=precision)
    return seen


@pytest.mark.parametrize(("level", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_the_optimizer_sees_whole_shapes_and_what_was_hung_on_a_parameter(ranks, level, precision):
    assert ranks(2, _attributes, level, precision)[0] == [("wide.weight", (128, 128), "yes")]


_FUSED: dict[str, Any] = {
    "Adam with amsgrad": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, fused=True),
}


def _fused(name: str, level: int) -> tuple[Any, set[bool]]:
    engine = engine_of(Regular(), _FUSED[name], zero=level)
    with _Updates() as updates:
        for step in range(3):
            engine.step(*own_shard(engine, *data(step)))
    return engine.full_state_dict(), updates.of_dtensors


class _Updates(TorchDispatchMode):
    """Notes whether fused updates get DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.of_dtensors: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUSED_UPDATES:
            self.of_dtensors.add(any(isinstance(weight, DTensor) for weight in args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow_cases("0", "2")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", _FUSED)
def test_fused_updates_are_given_the_shards_and_compute_what_one_process_does(ranks, name, level):
    state, of_dtensors = ranks(2, _fused, name, level)[0]
    model = Regular()
    optimizer = _FUSED[name]([p for p in model.parameters() if p.requires_grad])
    list(plain_loop(model, optimizer, [[data(step)] for step in range(3)]))
    assert_same_state(state, model.state_dict())
    assert of_dtensors == {False}


def _modes_around_the_update(level: int) -> list[bool]:
    engine = engine_of(Regular(), _FUSED["AdamW"], zero=level)
    seen = []

    def noted(*_: object, **__: object) -> None:
        seen.append(has_dispatch_mode())

    with (
        mock.patch.object(engine.sharded, "all_gather_parameters", noted),
        mock.patch.object(engine.storage, "check_transfers", noted),
    ):
        engine.step(*own_shard(engine, *data(0)))
    return seen


@pytest.mark.parametrize("level", [1, 2])
def test_collectives_before_and_after_a_fused_update_see_no_mode(ranks, level):
    for seen in ranks(2, _modes_around_the_update, level):
        assert len(seen) >= 2 and not any(seen)
