"""What an Engine holds, and gives back: parameters, states, gradients, initial values; and its summary."""

import gc
import unittest.mock
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import parity
from engines import LEVELS, engine_of, local, own_shard
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.weights.initial import Recording
from toys import Regular, data, squares

WIDTH = 128

REPLICATED = 4 * WIDTH * WIDTH * 4


def _bytes(tensors: list[torch.Tensor]) -> int:
    with without_torch_functions_of_tensors():  # a look is no use, which would gather
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _parameters() -> list[nn.Parameter]:
    """All that there are in this process."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [t for t in tensors if isinstance(t, nn.Parameter) and not isinstance(t, FakeTensor)]


def _held(level: int) -> dict[str, int]:
    """Bytes of the tensors that there are: parameters, optimizer states, gradients before a step and within one."""
    others = _parameters()  # of earlier tests

    def parameters() -> list[nn.Parameter]:
        return [p for p in _parameters() if not p.is_meta and all(p is not other for other in others)]

    def gradients() -> int:
        return _bytes([local(p.grad) for p in parameters() if p.grad is not None])

    engine = engine_of(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]), zero=level)
    batch = torch.randn(2, WIDTH)
    engine.step(batch, batch)
    gc.collect()
    states = [v for state in engine.optimizer.state.values() for v in state.values() if v.dim() > 0]
    found = {"parameters": _bytes([local(p) for p in parameters()]), "states": _bytes([local(s) for s in states])}
    engine.sharded.begin_micro_batch(last=False)
    squares(engine.model(batch), batch).backward()
    engine.sharded.finish_micro_batch()
    found["accumulated"] = gradients()
    engine.sharded.begin_micro_batch(last=True)
    squares(engine.model(batch), batch).backward()
    engine.sharded.finish_backward()
    found["gradients"] = gradients()
    assert engine.sharded.held_numel() * 4 == found["parameters"]
    return found


@pytest.mark.parametrize(
    ("level", "parameters", "states", "accumulated", "gradients"),
    [(0, 1, 1, 1, 1), (1, 1, 4, 1, 4), (2, 1, 4, 4, 4), (3, 4, 4, 4, 4)],
)
def test_what_a_level_shards_is_sharded(ranks, level, parameters, states, accumulated, gradients):
    for found in ranks(4, _held, level):
        assert found == {
            "parameters": REPLICATED // parameters,
            "states": 2 * REPLICATED // states,
            "accumulated": REPLICATED // accumulated,
            "gradients": REPLICATED // gradients,
        }


def _stack() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(8)])


def _whole_at_once(level: int) -> int:
    """The most bytes of whole initial values that were alive at any time."""
    alive: dict[int, int] = {}
    most = 0

    def tensor(self: Recording, name: str) -> torch.Tensor:
        nonlocal most
        value = original(self, name)
        alive[id(value.untyped_storage())] = value.nbytes
        weakref.finalize(value.untyped_storage(), alive.pop, id(value.untyped_storage()))
        most = max(most, sum(alive.values()))
        return value

    original = Recording.tensor
    with unittest.mock.patch.object(Recording, "tensor", tensor):
        engine_of(_stack, zero=level)
    return most


@pytest.mark.parametrize("level", [1, 3])
def test_a_callables_weights_are_made_one_unit_at_a_time(ranks, level):
    assert max(ranks(2, _whole_at_once, level)) <= 2 * WIDTH * WIDTH * 4


def _freed(fields: dict[str, Any]) -> list[bool]:
    engine = engine_of(Regular(), **fields)
    engine.step(*own_shard(engine, *data(0)))
    things = [weakref.ref(thing) for thing in (engine, engine.model, *engine.sharded.masters().values())]
    del engine
    gc.collect()
    return [thing() is None for thing in things]


@pytest.mark.parametrize("level", LEVELS)
def test_a_dropped_engine_gives_its_memory_back(ranks, level):
    assert all(ranks(2, _freed, dict(zero=level, precision="bf16"))[0])


def _summary() -> str:
    return parity.make_engine("gpt", dict(zero=1, precision="bf16")).summary().describe()


def test_the_summary_tells_what_is_held(ranks):
    total = sum(p.numel() for p in parity.build("gpt").parameters())
    text = ranks(2, _summary)[0]
    assert f"{total:,} in the model, {total:,} of them trained" in text
    assert "float32 master weights and optimizer states, bfloat16 computation, float32 gradient sums" in text
    assert "AdamW (fused)" in text
