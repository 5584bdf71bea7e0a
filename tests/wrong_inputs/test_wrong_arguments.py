"""Wrong arguments of ``parallelize``, in a world of one: each told in a sentence, before the module is changed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from wrong_inputs import Case, Said, assert_refused, say_all

SGD = partial(torch.optim.SGD, lr=0.1)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _parallelize(model: Any = None, plan: Any = None, optimizer: Any = SGD, loss_fn: Any = None, **more: Any) -> None:
    model = _model() if model is None else model
    loss_fn = nn.functional.cross_entropy if loss_fn is None else loss_fn
    ts.parallelize(model, ts.Plan() if plan is None else plan, optimizer=optimizer, loss_fn=loss_fn, **more)


def _with_parameter(value: torch.Tensor) -> nn.Module:
    model = _model()
    model.register_parameter("special", nn.Parameter(value, requires_grad=value.is_floating_point()))
    return model


def _laid_out() -> nn.Module:
    model = _model()
    _parallelize(model)
    return model


def _ignores_what_it_is_given(_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=0.1)


def _needs_a_size(size: int) -> nn.Module:
    return nn.Linear(size, size)


WRONG: dict[str, Case] = {
    "a plan as a dict": (lambda: _parallelize(plan={"zero": 3}), "plan is a dict", "tensorshard.Plan"),
    "a model as a list": (lambda: _parallelize([1]), "model is a list", "an nn.Module or a callable"),
    "a model as a path": (lambda: _parallelize("path/to/llama"), "model is a str", "tensorshard.from_pretrained("),
    "a model under DDP": (
        lambda: _parallelize(nn.parallel.DistributedDataParallel(_model())),
        "DistributedDataParallel", "give the module inside", "model.module",
    ),
    "a model that torch.compile made": (
        lambda: _parallelize(torch.compile(_model())), "OptimizedModule", "Plan(compile=True)"
    ),
    "a scripted model": (lambda: _parallelize(torch.jit.script(_model())), "RecursiveScriptModule", "plain nn.Module"),
    "a callable that returns text": (
        lambda: _parallelize(lambda: "gpt"), "returned a str", "an nn.Module was expected"
    ),
    "a callable that needs arguments": (
        lambda: _parallelize(_needs_a_size), "model()", "'size'", "functools.partial"
    ),
    "a model that is laid out": (lambda: _parallelize(_laid_out()), "laid out already", "tensorshard.parallelize"),
    "nothing to train": (lambda: _parallelize(_model().requires_grad_(False)), "no parameter", "requires a gradient"),
    "a complex parameter": (
        lambda: _parallelize(_with_parameter(torch.zeros(2, dtype=torch.complex64))), "'special'", "view_as_real"
    ),
    "an integer parameter": (lambda: _parallelize(_with_parameter(torch.arange(3))), "'special'", "int64", "buffer"),
    "sparse gradients": (
        lambda: _parallelize(nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 3))), "'0'", "sparse=True"
    ),
    "an optimizer by name": (lambda: _parallelize(optimizer="adamw"), "optimizer is a str", "functools.partial"),
    "an optimizer that exists": (
        lambda: _parallelize(optimizer=torch.optim.SGD(_model().parameters(), lr=0.1)),
        "optimizer is a SGD", "functools.partial",
    ),
    "a negative learning rate": (
        lambda: _parallelize(optimizer=partial(torch.optim.AdamW, lr=-1)), "optimizer(parameters) failed", "rate: -1"
    ),
    "an option that no optimizer has": (
        lambda: _parallelize(optimizer=partial(torch.optim.AdamW, learning_rate=1.0)),
        "optimizer(parameters) failed", "learning_rate",
    ),
    "an optimizer that takes parameters for names": (
        lambda: _parallelize(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)),
        "optimizer(parameters) failed", "to unpack", "call its argument named_parameters",
    ),
    "an optimizer that is none": (
        lambda: _parallelize(optimizer=list), "returned a Parameter in a list", "a torch Optimizer"
    ),
    "an optimizer of other parameters": (
        lambda: _parallelize(optimizer=_ignores_what_it_is_given), "shape (7,)", "that it was not given"
    ),
    "an optimizer that calls the model again": (
        lambda: _parallelize(optimizer=torch.optim.LBFGS), "LBFGS", "closure", "such as torch.optim.AdamW"
    ),
    "a loss that is a number": (lambda: _parallelize(loss_fn=0.5), "loss_fn is a float", "(output, targets) -> loss"),
    "a loss of one argument": (
        lambda: _parallelize(loss_fn=lambda output: output.mean()), "loss_fn takes (output)", "lambda output, targets"
    ),
    "a loss that is a class": (
        lambda: _parallelize(loss_fn=nn.CrossEntropyLoss), "the class CrossEntropyLoss", "CrossEntropyLoss()"
    ),
    "a unit that is not there": (
        lambda: _parallelize(plan=ts.Plan(shard_units=["layers.*"])), "no module", "'layers.*'"
    ),
    "a seed as text": (lambda: _parallelize(seed="1"), "seed is '1'", "an integer"),
    "a seed as a fraction": (lambda: _parallelize(seed=0.5), "seed is 0.5", "an integer"),
    "a device that is not there": (lambda: _parallelize(device="cuda"), "device 'cuda'", "no CUDA device", "'cpu'"),
    "a device that does not exist": (lambda: _parallelize(device="gpu"), "device 'gpu'", "'cpu' or 'cuda'"),
    "a timeout of 0": (lambda: _parallelize(timeout=0), "timeout=0", "more than 0 seconds"),
    "a timeout as text": (lambda: _parallelize(timeout="5m"), "timeout='5m'", "a number of seconds"),
    "a keyword that does not exist": (lambda: _parallelize(loss=1), "loss"),
    "Paddle's level by a number": (
        lambda: ts.group_sharded_parallel(_model(), SGD(_model().parameters()), 2), "level is 2", "'os_g'"
    ),
    "Paddle's call without an optimizer": (
        lambda: ts.group_sharded_parallel(_model(), SGD, "os"), "optimizer is a partial", "of the model"
    ),
    "Paddle's call with another model's optimizer": (
        lambda: ts.group_sharded_parallel(_model(), SGD(_model().parameters()), "os"),
        "not the model's", "model.parameters()",
    ),
    "Paddle's segments of no bytes": (
        lambda: ts.group_sharded_parallel(_model(), SGD(_model().parameters()), "os", segment_size=0),
        "segment_size is 0", "at least 1",
    ),
    "Paddle's saving of a plain model": (
        lambda: ts.save_group_sharded_model(_model(), "nowhere"), "did not come from group_sharded_parallel"
    ),
}  # fmt: skip


def _say_all() -> dict[str, Said]:
    return say_all(WRONG)


@pytest.fixture(scope="module")
def found(ranks) -> dict[str, Said]:
    return ranks(1, _say_all)[0]


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument(found, what):
    assert_refused(what, found[what], WRONG[what])
