"""A model that a plan was applied to: a second engine, or a forward that reads its old parameters, trains nothing."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from engines import ADAMW, engine_of, own_shard
from tensorshard.models import GPT, next_token_loss
from toys import data, squares

REGISTRY: dict[str, nn.Parameter] = {}


class Net(nn.Module):
    of_class: list[nn.Parameter] = []

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inlet, self.outlet = nn.Linear(6, 5), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.eye(5))
        REGISTRY["weight"] = self.weight
        Net.of_class[:] = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = REGISTRY["weight"] if self.way == "global" else self.of_class[0]
        return self.outlet(self.inlet(x) @ weight)


def _run(way: str, given: bool, fields: dict) -> tuple[str, bool]:
    model = Net(way) if given else lambda: Net(way)
    try:
        engine = engine_of(model, **fields)
        before = engine.full_state_dict()
        engine.step(*own_shard(engine, *data(0)))
    except (RuntimeError, ValueError) as error:
        after = engine.full_state_dict()
        return str(error), all(torch.equal(value, after[name]) for name, value in before.items())
    return "", False


@pytest.mark.fast_cases("global-module-{'zero': 0}")
@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=3), dict(zero=2, precision="bf16")], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["module", "callable"])
@pytest.mark.parametrize("way", ["global", "class"])
def test_a_parameter_held_out_of_sight(ranks, way, given, fields):
    for message, unchanged in ranks(2, _run, way, given, fields):
        assert "a forward of a Net (" in message
        assert "test_parallelized_models.py:" in message
        assert "reads parameter 'weight' as it was before parallelize" in message
        assert unchanged


def _reads_outside() -> float:
    model = Net("global")
    engine = engine_of(model, zero=1)
    engine_of(nn.Linear(6, 3), zero=1).step(*data(0))
    return float(REGISTRY["weight"].sum() + squares(torch.eye(5) @ REGISTRY["weight"], torch.eye(5))) + len(
        engine.full_state_dict()
    )


def test_other_code_may_read_it(ranks):
    assert ADAMW
    assert ranks(1, _reads_outside)[0] > 5


# -- a second plan --

PLANS: list[dict[str, Any]] = [
    dict(zero=0),
    dict(zero=0, precision="bf16"),
    dict(zero=1),
    dict(zero=2),
    dict(zero=3),
    dict(tp=2),
    dict(pp=2, micro_batches=2),
    dict(zero=0, recompute="full"),
]


def _gpt() -> nn.Module:
    torch.manual_seed(1)
    return GPT(61, 16, 2, 2, 30)


def _parallelize(model: Any, **fields: Any) -> ts.Engine:
    return ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=next_token_loss)


def _group_sharded(model: nn.Module) -> None:
    ts.group_sharded_parallel(model, torch.optim.SGD(list(model.parameters()), lr=0.1), "os")


def _message(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "accepted"


def _again(fields: dict[str, Any]) -> list[str]:
    model = _gpt()
    engine = _parallelize(model, **fields)
    messages = [
        _message(_parallelize, model, **fields),
        _message(_parallelize, model, zero=0),
        _message(_parallelize, engine.model, zero=1),
        _message(_parallelize, lambda: model, zero=1),
        _message(_parallelize, nn.Sequential(nn.Linear(3, 3), model), zero=0),
        _message(_parallelize, model.blocks[0], zero=0),
        _message(_group_sharded, model),
    ]
    if fields == dict(zero=0):  # the others hold process groups, which nobody can copy
        messages.append(_message(_parallelize, copy.deepcopy(model), zero=0))
    del engine
    gc.collect()
    return [*messages, _message(_parallelize, model, **fields)]


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_model_or_a_part_of_it_is_refused_the_second_time(ranks, fields):
    for messages in ranks(2, _again, fields):
        for message in messages:
            assert "is laid out already, by tensorshard.parallelize" in message
        assert messages[4].startswith("module '1' of the model")


def _after_group_sharded() -> list[str]:
    model = _gpt()
    _group_sharded(model)
    return [_message(_parallelize, model, zero=2), _message(_group_sharded, model)]


def test_the_two_entry_points_are_not_mixed(ranks):
    for messages in ranks(2, _after_group_sharded):
        for message in messages:
            assert "is laid out already, by tensorshard.group_sharded_parallel" in message
