"""Buffers that a forward computes from its batch: refused by name before an update, unless all ranks have the same."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import parity
import seeds
import tensorshard as ts
from engines import ADAMW, LEVELS, engine_of, own_shard
from tensorshard.engine.guards.batch_buffers import BatchBuffers
from toys import data, squares


class Tracking(nn.Module):
    """Follows its batch in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.group = way, None
        self.register_buffer("center", torch.zeros(16), persistent=way != "own")
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = (x - self.center) * self.scale
        if not self.training:
            return output
        self.calls += 1
        with torch.no_grad():
            if self.way in ("mean", "own") or (self.way == "late" and self.calls > 2):
                self.center.lerp_(x.mean(0), 0.1)
            elif self.way == "data":  # whose version stays
                self.center.data.lerp_(x.mean(0), 0.1)
            elif self.way == "counts":  # whose sum is the same on every rank
                self.count += nn.functional.one_hot(x[:, :4].argmax(1), 4).sum(0)
            elif self.way == "replaced":
                self.center = 0.9 * self.center + 0.1 * x.mean(0)
            elif self.way == "summed":
                sums = torch.cat([x.sum(0), x.new_tensor([len(x)])])
                if dist.is_initialized() and self.group is not None:
                    sums = ts.distributed.reduce(sums, group=self.group)
                self.center.lerp_(sums[:-1] / sums[-1], 0.1)
            elif self.way == "parameter" and self.calls == 1:
                self.scale.data.copy_(x.std(0) + 0.5)
        return output


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        seeds.seed(3)
        self.inlet, self.tracking, self.outlet = nn.Linear(6, 16), Tracking(way), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(torch.tanh(self.tracking(self.inlet(x))))


def _run(way: str, fields: dict[str, Any], own_loop: bool = False, steps: int = 5) -> tuple[str, int, Any]:
    plan = ts.Plan(**fields)
    engine = ts.parallelize(Net(way), plan, optimizer=ADAMW, loss_fn=squares, sample_inputs=data(0)[0][:1])
    for module in engine.model.modules():
        if isinstance(module, Tracking):
            module.group = engine.mesh.dp_group
    before = engine.full_state_dict()
    for step in range(steps):
        x, y = own_shard(engine, *data(step))
        try:
            if own_loop:
                engine.backward(squares(engine.model(x), y))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step(x, y)
        except RuntimeError as error:
            if step == 0 and not own_loop and way not in ("parameter", "data"):
                parity.assert_same_state(engine.full_state_dict(), before, 0.0)
            return str(error), step, None
    return "", steps, engine.full_state_dict()


def _alone(way: str, steps: int = 5) -> dict[str, torch.Tensor]:
    model = Net(way)
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        squares(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _assert_named(found: list[tuple[str, int, Any]], buffer: str, steps: int = 0) -> None:
    for message, step, _ in found:
        assert message.startswith(f"module 'tracking' (Tracking) changes its buffer '{buffer}' in forward")
        assert "ts.distributed.reduce" in message and "persistent=False" in message
        assert step == steps


@pytest.mark.fast_cases("replaced-center-0")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("way", "buffer"), [("mean", "center"), ("counts", "count"), ("replaced", "center"), ("data", "center")]
)
def test_values_of_a_ranks_samples_are_refused_before_the_first_update(ranks, way, buffer, level):
    _assert_named(ranks(2, _run, way, dict(zero=level)), buffer)


@pytest.mark.parametrize(
    ("world", "fields"), [(4, dict(pp=2, micro_batches=2)), (4, dict(tp=2)), (2, dict(recompute="full"))], ids=str
)
def test_every_rank_of_other_plans_refuses_them(ranks, world, fields):
    _assert_named(ranks(world, _run, "mean", fields), "center")


def test_a_loop_of_ones_own_refuses_them(ranks):
    _assert_named(ranks(2, _run, "mean", dict(zero=1), own_loop=True), "center")


def test_a_change_that_comes_late_is_found(ranks):
    _assert_named(ranks(2, _run, "late", dict(zero=2)), "center", steps=3)


@pytest.mark.parametrize("fields", [dict(zero=3), dict(zero=1)], ids=str)
@pytest.mark.parametrize("own_loop", [False, True])
def test_sums_over_the_ranks_are_those_of_one_process(ranks, fields, own_loop):
    for message, _, state in ranks(2, _run, "summed", fields, own_loop=own_loop):
        assert message == ""
        if state:
            parity.assert_same_state(state, _alone("summed"), 1e-5)


@pytest.mark.parametrize("way", ["mean", "summed"])
def test_tensor_parallel_ranks_see_all_of_the_batch(ranks, way):
    [(message, _, state), _] = ranks(2, _run, way, dict(tp=2))
    assert message == ""
    parity.assert_same_state(state, _alone(way), 1e-5)


def test_counters_and_buffers_of_a_ranks_own_are_allowed(ranks):
    for way in ("none", "own"):
        assert [message for message, _, _ in ranks(2, _run, way, dict(zero=1))] == ["", ""]


def test_a_parameter_that_a_forward_sets_from_its_batch_is_refused(ranks):
    for message, step, _ in ranks(2, _run, "parameter", dict(zero=0)):
        assert "different values of the parameter 'tracking.scale'" in message
        assert step == 0


def _compared_in_fp64() -> None:
    """A comparison reads what it compares: nothing is written, whatever the type."""
    model = Net("none").double()
    engine = ts.parallelize(model, ts.Plan(zero=0), optimizer=ADAMW, loss_fn=squares)
    buffers = BatchBuffers(engine.sharded, engine.mesh, engine.device)
    engine.model.tracking.center.fill_(2.0)
    before = engine.full_state_dict()
    buffers.check(0)
    parity.assert_same_state(engine.full_state_dict(), before, 0.0)


def test_a_comparison_changes_nothing(ranks):
    ranks(2, _compared_in_fp64)


def _short(way: str) -> str:
    engine = engine_of(Net(way), zero=1)
    engine.model.tracking.group = engine.mesh.dp_group
    loader = engine.loader(TensorDataset(*data(0, 9)), 8, shuffle=False)
    try:
        for x, y in loader:
            engine.step(x, y)
    except RuntimeError as error:
        return str(error)
    return ""


def test_samples_that_stand_in_have_no_part_in_buffers(ranks):
    for message in ranks(2, _short, "summed"):
        assert "changes its buffer 'center' in forward" in message and "drop_last=True" in message
    assert ranks(2, _short, "none") == ["", ""]
