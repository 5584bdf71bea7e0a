"""Parameters and buffers that a forward reads through other places than their registrations: as on one process."""

import weakref
from collections import deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import parity
import seeds
import tensorshard as ts
from engines import ADAMW, own_shard
from toys import data, squares

WIDTH = 16
Pair = namedtuple("Pair", "name value")


class Variable:
    """As keras' torch backend has them."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.value


class Slotted:
    __slots__ = ("__value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.__value = value

    def read(self) -> torch.Tensor:
        return self.__value


@dataclass(frozen=True)
class Record:
    value: torch.Tensor


def _closure(value: torch.Tensor) -> Any:
    def read() -> torch.Tensor:
        return value

    return read


def _closure_of_object(value: torch.Tensor) -> Any:
    variable = Variable(value)
    return lambda: variable.value


def _given(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value


class Doubled(torch.autograd.Function):
    """Takes the parameter without any of torch's functions in between."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grads[0] @ weight.T, 2 * x.T @ grads[0]


class _Unregistered(nn.Module):
    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value


# How a block keeps its parameter a second time, and how its forward reads it there.
WAYS: dict[str, tuple[Any, Any]] = {
    "object": (Variable, lambda held: held.value),
    "list": (lambda p: [0, p], lambda held: held[1]),
    "tuple": (lambda p: (0, (p, 1)), lambda held: held[1][0]),
    "dict": (lambda p: {"a": [p]}, lambda held: held["a"][0]),
    "namedtuple": (lambda p: Pair("w", p), lambda held: held.value),
    "frozen dataclass": (Record, lambda held: held.value),
    "namespace": (lambda p: SimpleNamespace(inner=SimpleNamespace(w=p)), lambda held: held.inner.w),
    "closure": (_closure, lambda held: held()),
    "closure of an object": (_closure_of_object, lambda held: held()),
    "default": (lambda p: lambda q=p: q, lambda held: held()),
    "keyword default": (lambda p: lambda *, q=p: q, lambda held: held()),
    "partial": (lambda p: partial(_given, p), lambda held: held()),
    "partial keyword": (lambda p: partial(_given, value=p), lambda held: held()),
    "method of an object": (lambda p: Variable(p).times, lambda held: held.__self__.value),
    "method of the tensor": (lambda p: p.t, lambda held: held().t()),
    "weak reference": (weakref.ref, lambda held: held()),
    "weak values": (lambda p: weakref.WeakValueDictionary(w=p), lambda held: held["w"]),
    "weak keys": (lambda p: weakref.WeakKeyDictionary({p: 1}), lambda held: next(iter(held))),
    "weak set": (lambda p: weakref.WeakSet([p]), lambda held: next(iter(held))),
    "key": (lambda p: {p: "w"}, lambda held: next(iter(held))),
    "set": (lambda p: {p}, lambda held: next(iter(held))),
    "deque": (lambda p: deque([None, p]), lambda held: held[1]),
    "slot": (Slotted, lambda held: held.read()),
    "hidden module": (lambda p: [_Unregistered(p)], lambda held: held[0].value),
    "vars": (None, None),
    "function": (Variable, None),
}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        if way == "vars":
            object.__setattr__(self, "second", self.weight)
        elif way != "plain":
            vars(self)["held"] = WAYS[way][0](self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "plain":
            return x + torch.tanh(x @ self.weight)
        if self.way == "vars":
            return x + torch.tanh(x @ self.second)
        if self.way == "function":
            return x + torch.tanh(Doubled.apply(x, self.held.value) / 2)
        return x + torch.tanh(x @ WAYS[self.way][1](self.held))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        seeds.seed(5)
        self.inlet, self.outlet = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        return self.outlet(h)


def _train(build: Any, fields: dict[str, Any], given: bool = False, steps: int = 3) -> tuple[list[float], dict]:
    model = build() if given else build
    sample = data(0)[0][:2]
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=squares, sample_inputs=sample)
    losses = [engine.step(*own_shard(engine, *data(step))).item() for step in range(steps)]
    return losses, engine.full_state_dict()


def _all_ways(fields: dict[str, Any], given: bool) -> dict[str, Any]:
    found = {}
    for way in ("plain", *WAYS):
        try:
            found[way] = _train(partial(Net, way), fields, given)
        except Exception as error:  # shown below
            found[way] = f"{type(error).__name__}: {error}"
    return found


PLANS = [
    dict(zero=0),
    dict(zero=1),
    dict(zero=2, precision="bf16"),
    dict(zero=3),
    dict(zero=3, precision="bf16", recompute="full"),
    dict(zero=1, recompute="full"),
    dict(tp=2),
    dict(pp=2, micro_batches=2),
]


@pytest.mark.slow
@pytest.mark.fast_cases("{'zero': 3}-module")
@pytest.mark.parametrize("given", [False, True], ids=["callable", "module"])
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_parameter_read_in_another_place_is_trained(ranks, fields, given):
    found = ranks(2, _all_ways, fields, given)[0]
    losses, state = found["plain"]
    wrong = {}
    for way in WAYS:
        try:
            assert not isinstance(found[way], str), found[way]
            assert found[way][0] == pytest.approx(losses, rel=1e-6)
            parity.assert_same_state(found[way][1], state, 1e-6)
        except AssertionError as error:
            wrong[way] = str(error)[:1500]
    assert not wrong


class Sharing(nn.Module):
    """Blocks that read the first block's parameter through one list; with `plain`, by its registration."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        seeds.seed(5)
        self.inlet, self.outlet = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block("plain") for _ in range(3))
        self.register_buffer("shift", torch.linspace(0.0, 1.0, WIDTH))
        self.plain = plain
        shared = Variable([self.blocks[0].weight, self.shift])
        for block in self.blocks:
            block.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            weight, shift = (self.blocks[0].weight, self.shift) if self.plain else block.shared.value
            h = block(h + shift) + h @ weight
        return self.outlet(h)


@pytest.mark.fast_cases("{'zero': 3}", "{'zero': 0}")
@pytest.mark.parametrize("fields", [*PLANS, dict(zero=3, dp_replicate=2), dict(tp=2, zero=3)], ids=str)
def test_an_object_that_blocks_share(ranks, fields):
    world = 4 if len(fields) == 2 and "zero" in fields and ("dp_replicate" in fields or "tp" in fields) else 2
    (losses, state), *_ = ranks(world, _train, partial(Sharing, True), fields)
    (found, end), *_ = ranks(world, _train, partial(Sharing, False), fields)
    assert found == pytest.approx(losses, rel=1e-6)
    parity.assert_same_state(end, state, 1e-6)


class Buffered(nn.Module):
    """Follows a buffer that an object holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.tensor(0.0))
        self.object = Variable(self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.object.value += 1
        return self.linear(x) * self.calls


@pytest.mark.parametrize("given", [False, True], ids=["callable", "module"])
@pytest.mark.parametrize("level", [0, 3])
def test_a_buffer_that_an_object_changes(ranks, level, given):
    for losses, state in ranks(2, _train, Buffered, dict(zero=level), given):
        assert not state or state["calls"].item() == len(losses) == 3


def _refused() -> tuple[list[bool], str]:
    model = Net("tuple")
    before = [block.held[1][0] is block.weight for block in model.blocks]
    held = [block.held for block in model.blocks]
    try:
        ts.parallelize(model, ts.Plan(zero=3), optimizer=lambda _: 1 / 0, loss_fn=squares)
    except ZeroDivisionError as error:
        same = [block.held is was and was[1][0] is block.weight for block, was in zip(model.blocks, held, strict=True)]
        return before + same, type(error).__name__
    return [], ""


def test_a_refused_plan_leaves_the_places_as_they_were(ranks):
    same, error = ranks(1, _refused)[0]
    assert error
    assert all(same)
