"""A module is laid out once: a second engine would train nothing."""

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3)

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
