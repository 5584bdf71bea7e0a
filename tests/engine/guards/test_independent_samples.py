"""Forwards in which a sample depends on the others of its batch: refused by name before the first update."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import parity
import seeds
import tensorshard as ts
from engines import ADAMW, engine_of, own_shard
from toys import data, squares


class Coupled(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.group = way, None
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.register_buffer("calls", torch.tensor(0))
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.register_buffer("ranks", torch.full((16,), float(rank)))
        self.count, self.last = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        if self.way == "max":
            return x / x.abs().max()
        if self.way == "mean":
            return x - torch.mean(x, 0)
        if self.way == "norm":
            return x / x.norm()
        if self.way == "amax":
            return x / x.detach().abs().amax((0, 1))
        if self.way == "var":
            return x / (1 + x.var(dim=(0, 1)))
        if self.way == "training":
            return x - x.mean(0) if self.training else x
        if self.way == "flipped":
            return x + 0.1 * x.flip(0)
        if self.way == "attends":
            return x + 0.1 * (x @ x.t()).softmax(-1) @ x
        if self.way == "earlier":
            return x.cumsum(0)
        if self.way == "repeated":
            return x.repeat(2, 1).view(-1, 2, 16).mean(1)
        if self.way == "slightly":
            return x * (1 + 2e-5 * x.detach().max())
        if self.way == "halves":
            first, second = x.chunk(2)
            return torch.cat([first * 2, second])
        if self.way == "divided":
            return x / len(x)
        if self.way == "written":
            if self.training:
                with torch.no_grad():
                    self.weight.mul_(0.9)
            return x @ self.weight
        if self.way == "batch norm":
            return F.batch_norm(x, None, None, training=True)
        if self.way == "left":
            self.last, last = x.detach(), self.last
            return x if last is None or len(last) != len(x) else x + 0.1 * last
        if self.way == "counted":
            return x * (1 + 0.1 * self.count)
        if self.way == "of all ranks":
            largest = x.detach().abs().max()
            if dist.is_initialized() and self.group is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
            return x / largest + 0.0 * x.max()
        if self.way == "of weights":
            return x @ (self.weight / (self.weight * 2).abs().max())
        if self.way == "of samples":
            return x / x.abs().amax(-1, keepdim=True) + torch.max(x, -x)
        if self.way == "for a log":
            self.logged = x.max().item()
        if self.way == "own state":
            return x + 0.0 * x.detach().amax() + self.ranks
        if self.way == "drawn":
            return x + 0.0 * torch.rand_like(x) * x.max()
        return x


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        seeds.seed(3)
        self.inlet, self.coupled, self.outlet = nn.Linear(6, 16), Coupled(way), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(torch.tanh(self.coupled(self.inlet(x))))


def _run(way: str, fields: dict[str, Any], own_loop: bool = False) -> tuple[str, dict[str, Any]]:
    engine = engine_of(Net(way), **fields)
    coupled = engine.model.coupled if fields.get("pp", 1) == 1 else Coupled(way)
    coupled.group = engine.mesh.dp_group
    for step in range(3):
        x, y = own_shard(engine, *data(step))
        try:
            if own_loop:
                engine.backward(squares(engine.model(x), y))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step(x, y)
        except RuntimeError as error:
            dist.barrier()
            assert step == 0
            return str(error), {}
    return "", {**engine.full_state_dict(), "count": torch.tensor(coupled.count)}


def _alone(way: str) -> dict[str, torch.Tensor]:
    model = Net(way)
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        squares(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "count": torch.tensor(model.coupled.count)}


PLANS = [dict(zero=0), dict(zero=1), dict(zero=3), dict(zero=3, recompute="full")]


@pytest.mark.parametrize("fields", PLANS, ids=str)
@pytest.mark.parametrize("way", ["max", "amax", "mean", "norm", "var"])
def test_what_depends_on_the_batch_is_refused(ranks, way, fields):
    for message, _ in ranks(2, _run, way, fields):
        assert "module 'coupled' (Coupled), by" in message
        assert "test_independent_samples.py:" in message


@pytest.mark.parametrize("fields", [dict(zero=3), dict(pp=2, micro_batches=2)], ids=str)
@pytest.mark.parametrize(
    "way",
    ["training", "flipped", "attends", "earlier", "repeated", "slightly", "batch norm", "halves", "divided"],
)
def test_every_way_that_a_sample_can_depend_on_others_is_seen(ranks, way, fields):
    for message, _ in ranks(2, _run, way, fields):
        assert "module 'coupled' (Coupled), by" in message


@pytest.mark.slow
def test_what_a_forward_leaves_for_the_next_micro_batch_is_refused(ranks):
    for fields in (dict(micro_batches=2), dict(pp=2, micro_batches=2)):
        world_size = 2 if "pp" in fields else 1
        assert all(
            "goes on with what its last forward has left" in said for said, _ in ranks(world_size, _run, "left", fields)
        )
        assert ranks(world_size, _run, "counted", fields)[0][0] == ""
    assert ranks(2, _run, "left", dict(zero=1))[0][0] == ""  # each rank goes on with its own samples


@pytest.mark.parametrize("fields", [dict(micro_batches=2), dict(zero=1), dict(zero=3)], ids=str)
def test_weights_that_a_forward_writes_are_written_once_a_forward(ranks, fields):
    world_size = 1 if "micro_batches" in fields else 2
    [(message, state), *_] = ranks(world_size, _run, "written", fields)
    model = Net("written")
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        for x, y in zip(*(part.chunk(fields.get("micro_batches", 1)) for part in data(step)), strict=True):
            (squares(model(x), y) / fields.get("micro_batches", 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert message == ""
    torch.testing.assert_close(state["coupled.weight"], model.coupled.weight.detach(), rtol=1e-4, atol=1e-5)


def test_a_single_sample_a_rank_is_joined_with_a_neighbours(ranks):
    for message, _ in ranks(4, _run, "max", dict(zero=1, micro_batches=2)):
        assert "module 'coupled' (Coupled), by" in message


def _unasked() -> float:
    engine = ts.parallelize(Net("max"), ts.Plan(zero=1), optimizer=ADAMW, loss_fn=squares, check_samples=False)
    return engine.step(*own_shard(engine, *data(0))).item()


def test_it_need_not_be_asked(ranks):
    assert len({*ranks(2, _unasked)}) == 1


def _hooked() -> list[int]:
    engine, seen = engine_of(Net("none"), zero=3), []
    engine.model.inlet.register_forward_hook(lambda *_: seen.append(1))
    for step in range(2):
        engine.step(*own_shard(engine, *data(step)))
    return seen


def test_hooks_count_the_steps_forwards_alone(ranks):
    assert ranks(2, _hooked) == [[1, 1]] * 2


def test_every_rank_of_other_plans_refuses_it(ranks):
    for fields in (dict(zero=1, tp=2, tp_plan={"inlet": "colwise_gather"}), dict(zero=3, dp_replicate=2)):
        for message, _ in ranks(4, _run, "max", fields):
            assert "module 'coupled' (Coupled), by" in message


def test_micro_batches_are_parts_too(ranks):
    for world_size, fields in ((1, dict(micro_batches=2)), (2, dict(zero=3, micro_batches=2))):
        for message, _ in ranks(world_size, _run, "max", fields):
            assert "module 'coupled' (Coupled), by" in message
    assert ranks(1, _run, "of samples", dict(micro_batches=2))[0][0] == ""


def test_a_loop_of_ones_own_refuses_it(ranks):
    for message, _ in ranks(2, _run, "max", dict(zero=1), True):
        assert "module 'coupled' (Coupled), by" in message


@pytest.mark.parametrize("fields", PLANS[1:3], ids=str)
@pytest.mark.parametrize("way", ["of all ranks", "of weights", "of samples", "for a log", "none"])
def test_what_does_not_is_as_in_one_process_and_a_comparison_changes_nothing(ranks, way, fields):
    [(message, state), _] = ranks(2, _run, way, fields)
    assert message == ""
    parity.assert_same_state(state, _alone(way), 1e-5)


def test_a_buffer_that_is_each_ranks_own_is_no_fault(ranks):
    assert [message for message, _ in ranks(2, _run, "own state", dict(zero=1))] == ["", ""]


def test_random_numbers_and_one_data_rank_are_no_fault(ranks):
    assert [message for message, _ in ranks(2, _run, "drawn", dict(zero=1))] == ["", ""]
    alone = dict(tp=2, tp_plan={"inlet": "colwise_gather"})
    assert [message for message, _ in ranks(2, _run, "max", alone)] == ["", ""]


class AtLeastFour(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            raise ValueError(f"{len(x)} samples are too few")
        return super().forward(x)


def _step_of_a_picky_stage(fields: dict[str, Any]) -> str:
    model = nn.Sequential(AtLeastFour(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    try:
        plan = ts.Plan(**fields)
        engine = ts.parallelize(model, plan, optimizer=ADAMW, loss_fn=squares, sample_inputs=torch.zeros(4, 6))
        engine.step(*data(0))
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


def test_a_stage_that_others_wait_for_says_why_it_cannot_be_asked(ranks):
    assert ranks(1, _step_of_a_picky_stage, dict(micro_batches=2)) == [""]
    first, second = ranks(2, _step_of_a_picky_stage, dict(pp=2, micro_batches=2))
    assert "2 samples are too few" in first and "parallelize(check_samples=False) does not ask" in first
    assert "2 samples are too few" in second


class Lists(nn.Linear):
    """Returns a list with a tensor for each sample, and as many tensors that have rows for all of them."""

    def __init__(self, is_coupled: bool) -> None:
        super().__init__(6, 8)
        self.is_coupled = is_coupled

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        h = super().forward(x)
        if self.is_coupled:
            h = h - h.mean(0)
        return list(h.unflatten(1, (4, 2))), [h * number for number in range(1, len(x) + 1)]


def _listed(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return squares(torch.stack(output[0]).flatten(1)[:, :3] + output[1][0][:, :3], targets)


def _step_of_lists(is_coupled: bool, size: int) -> str:
    engine = engine_of(Lists(is_coupled), loss_fn=_listed, zero=1)
    try:
        engine.step(*own_shard(engine, *data(0, size)))
    except RuntimeError as error:
        return str(error)
    return engine._samples.verdict


@pytest.mark.parametrize("size", [8, 16])
def test_lists_of_samples_are_compared_by_their_entries(ranks, size):
    assert ranks(2, _step_of_lists, False, size) == ["alone"] * 2
    assert all("depends on the other samples" in message for message in ranks(2, _step_of_lists, True, size))
