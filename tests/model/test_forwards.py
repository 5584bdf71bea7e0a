"""Forwards that are changed on instances: their order, that they can be undone, copies, and users' own."""

import copy
import itertools
import re
from functools import partial, wraps
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

import tensorshard as ts
from parity import assert_same_state
from tensorshard.model.copies import copy_module
from tensorshard.model.fake_copies import copy_with
from tensorshard.model.forwards import (
    Role,
    convert_forward,
    forward_within,
    has_users_forward,
    own_forward,
    replace_forward,
    runs_forward_of,
    wrap_forward,
)

SOURCES = Path(ts.__file__).parent


class Scale(nn.Module):
    def __init__(self, value: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def adding(digit, forward, /, x):
    """Appends a decimal digit, so that the result tells the order of the calls."""
    return 10 * forward(x) + digit


def test_no_other_module_sets_a_forward():
    others = (
        "forwards.py",
        "autograd_functions.py",
    )  # the second sets those of autograd functions, which are no modules
    setting = re.compile(r"\.forward\s*=[^=]|setattr\([^)]*[\"']forward[\"']")
    found = [
        path.name
        for path in SOURCES.rglob("*.py")
        if path.name not in others and any(setting.search(line) for line in path.read_text().splitlines())
    ]
    assert found == []


ROLES = (Role.SUMMED_GRADIENTS, Role.RECOMPUTATION, Role.COMPILATION)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_is_that_of_the_roles_whatever_the_order_of_the_calls(order):
    module = Scale()
    calls = [
        lambda: wrap_forward(module, ROLES[0], partial(adding, 1)),
        lambda: wrap_forward(module, ROLES[1], partial(adding, 2)),
        lambda: convert_forward(module, ROLES[2], lambda forward: lambda x: 10 * forward(x) + 3),
        lambda: replace_forward(module, Role.SPLIT_LAYER, lambda x: 7 * x),
    ]
    for index in order:
        calls[index]()
    assert module(torch.tensor(1.0)) == 7123
    assert forward_within(module, ROLES[1])(torch.tensor(1.0)) == 71
    assert own_forward(module)(torch.tensor(1.0)) == 2


def test_a_replacement_further_out_takes_the_place_of_one_further_in():
    module = Scale()
    replace_forward(module, Role.SEQUENCE_LAYER, lambda x: 5 * x)
    replace_forward(module, Role.SPLIT_LAYER, lambda x: 7 * x)
    assert module(torch.tensor(1.0)) == 5


@pytest.mark.parametrize("again", [wrap_forward, replace_forward, convert_forward])
def test_a_role_is_given_once(again):
    module = Scale()
    replace_forward(module, Role.SPLIT_LAYER, lambda x: 7 * x)
    before = dict(vars(module))
    with pytest.raises(ValueError, match="this Scale has a forward for SPLIT_LAYER already"):
        again(module, Role.SPLIT_LAYER, lambda *_: None)
    assert vars(module) == before
    assert module(torch.tensor(1.0)) == 7


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_replacement_loses_nothing_further_in(order):
    module = Scale()
    calls = [
        lambda: wrap_forward(module, Role.FP32, partial(adding, 1)),
        lambda: replace_forward(module, Role.SPLIT_LAYER, lambda x: 7 * x),
    ]
    calls[order[0]]()
    with pytest.raises(ValueError, match="SPLIT_LAYER replaces that of this Scale, which would lose FP32"):
        calls[order[1]]()


def test_a_forward_that_the_user_set_is_what_runs_and_is_not_replaced():
    module = Scale()
    module.forward = lambda x: 3 * x
    assert has_users_forward(module) and not runs_forward_of(module, Scale)
    with pytest.raises(ValueError, match="would lose a forward that was set on the instance"):
        replace_forward(module, Role.SPLIT_LAYER, lambda x: 7 * x)
    wrap_forward(module, Role.RECOMPUTATION, partial(adding, 1))
    assert module(torch.tensor(1.0)) == 31
    assert has_users_forward(module)


def test_a_forward_that_was_set_later_is_not_lost_in_silence():
    module = Scale()
    wrap_forward(module, Role.FP32, partial(adding, 1))
    module.forward = lambda x: 3 * x
    with pytest.raises(RuntimeError, match="set after tensorshard had changed it"):
        wrap_forward(module, Role.RECOMPUTATION, partial(adding, 2))
    assert module(torch.tensor(1.0)) == 3


def test_a_module_has_arguments_of_any_name():
    class Named(nn.Module):
        def forward(self, forward, around):
            return forward + around

    module = Named()
    wrap_forward(module, Role.RECOMPUTATION, lambda inner, /, **kwargs: 2 * inner(**kwargs))
    assert module(forward=1, around=2) == 6


# -- copies --


def _method(module, x):
    return 3 * module.weight * x


def _decorated(function):
    @wraps(function)
    def call(*args, **kwargs):
        return 3 * function(*args, **kwargs)

    return call


def _around(forward):
    return lambda x, forward=forward: 3 * forward(x)


class Callable3:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return 3 * self.module.weight * x


USERS = {
    "method": lambda module: MethodType(_method, module),
    "partial": lambda module: partial(_method, module),
    "closure over the forward": lambda module: _decorated(module.forward),
    "closure over the module": lambda module: lambda x: 3 * module.weight * x,
    "default": lambda module: _around(module.forward),
    "partial of a closure": lambda module: partial(lambda inner, x: inner(x), _decorated(module.forward)),
    "object": Callable3,
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", USERS)
def test_a_copy_runs_the_users_forward_on_its_own_parameters(kind, wrapped):
    model = nn.Sequential(Scale())
    model[0].forward = USERS[kind](model[0])
    if wrapped:
        wrap_forward(model[0], Role.RECOMPUTATION, partial(adding, 1))
    copied = copy_with(model, lambda name, tensor: torch.tensor(5.0))
    x = torch.tensor(1.0)
    assert (copied(x), model(x)) == ((151, 61) if wrapped else (15, 6))
    copied(x).backward()
    assert copied[0].weight.grad is not None and model[0].weight.grad is None


def test_a_copy_has_code_of_its_own_around_it():
    module = Scale()
    wrap_forward(module, Role.RECOMPUTATION, partial(adding, 1))
    for copied in (copy.deepcopy(module), copy_module(module, {})):
        with torch.no_grad():
            copied.weight.fill_(5.0)
        wrap_forward(copied, Role.COMPILATION, partial(adding, 2))
        assert copied(torch.tensor(1.0)) == 512
    assert module(torch.tensor(1.0)) == 21


def test_functions_that_refer_to_no_module_are_shared():
    module = Scale()
    module.forward = free = lambda x: 3 * x
    assert vars(copy_module(module, {}))["forward"] is free


# -- users' forwards under plans --


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """One whose user changed the forwards of a block, of a norm, and of a linear layer, on the instances."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 3)
        for block in self.blocks:
            block.forward = _half(block.forward)
        self.blocks[1].norm.forward = _half(self.blocks[1].norm.forward)
        self.blocks[2].up.forward = MethodType(_squashed, self.blocks[2].up)
        self.head.forward = _half(self.head.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _half(forward):
    return lambda x: 0.5 * forward(x)


def _squashed(layer, x):
    return torch.sin(nn.functional.linear(x, layer.weight, layer.bias))


def _batch(step, parts=1, index=0):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return inputs.chunk(parts)[index], targets.chunk(parts)[index]


SGD = partial(torch.optim.SGD, lr=0.5)


def _train_under(fields):
    engine = ts.parallelize(
        Net(), ts.Plan(**fields), optimizer=SGD, loss_fn=nn.functional.cross_entropy, sample_inputs=_batch(0)[0]
    )
    for step in range(3):
        engine.step(*_batch(step, engine.mesh.dp_size, engine.mesh.dp_rank))
    return engine.full_state_dict()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"zero": 3, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "recompute": "selective"}, marks=pytest.mark.slow),
        {"pp": 2, "micro_batches": 2},
        {"tp": 2},
        {"tp": 2, "tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
    ],
    ids=str,
)
def test_users_forwards_run_under_every_plan(ranks, fields):
    expected = Net()
    optimizer = SGD(expected.parameters())
    for step in range(3):
        inputs, targets = _batch(step)
        nn.functional.cross_entropy(expected(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(ranks(2, _train_under, fields)[0], expected.state_dict(), 1e-5)
