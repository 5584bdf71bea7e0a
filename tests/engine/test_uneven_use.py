"""Data ranks that use different parameters, or make different calls: exact, or told in a sentence."""

import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import strict_nccl
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.torch_private.process_groups import default_store, group_timeout, set_group_timeout
from toys import Odd, data, plain_loop, squares

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-6)


class Branching(nn.Module):
    """Parameters inside of a block, a scalar and a bare one that only some batches use, beside batch normalizations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Branch(), Branch(), Branch()])
        self.sometimes = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.4))
        self.never = nn.Parameter(torch.ones(5))
        self.outlet = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = bool(x[0, 0] > 0)
        h = x
        for block in self.blocks:
            h = block(h, used)
        y = self.outlet(h)
        return y + self.sometimes(x) * self.scale if used else y


class Branch(nn.Module):
    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.extra = nn.Linear(width, width)
        self.down = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        h = torch.relu(self.norm(self.up(x)))
        if used:
            h = h + self.extra(h)
        return x + self.down(h)


def _train(build: Any, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(build(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=squares)
    losses = []
    for step in range(4):
        batch = data(step, sometimes=4)
        losses.append(engine.step(*(t.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for t in batch)).item())
    return losses, engine.full_state_dict()


class Wide(Branching):
    """Blocks whose gradients travel alone; batches use all parameters, or those of a branch not at all."""

    def __init__(self) -> None:
        super().__init__()
        del self.never
        self.blocks = nn.ModuleList([Branch(520), Branch(520), Branch(520)])


@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=3),
        pytest.param(dict(zero=3, micro_batches=2), marks=pytest.mark.slow),
        pytest.param(dict(zero=3, dp_replicate=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_zero_3_with_parameters_that_only_some_ranks_use(ranks, fields):
    world_size = 4 if "micro_batches" not in fields else 2
    losses, state = ranks(world_size, _train, Odd, fields)[0]
    model = Odd()
    parts = world_size * fields.get("micro_batches", 1)
    steps = [list(zip(*(t.chunk(parts) for t in data(step, sometimes=4)), strict=True)) for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    wanted = {name: value for name, value in model.state_dict().items() if name != "calls"}
    parity.assert_same_state({name: value for name, value in state.items() if name != "calls"}, wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_batch_normalization_beside_them_is_the_same_at_every_level(ranks, size):
    found = [ranks(size, _train, Branching, dict(zero=level)) for level in range(4)]
    losses, state = found[0][0]
    assert losses[-1] < losses[0]
    assert torch.equal(state["never"], torch.ones(5))
    for results in found[1:]:
        torch.testing.assert_close(results[0][0], losses, rtol=1e-5, atol=1e-6)
        parity.assert_same_state(results[0][1], state, 1e-5)


def _with_log(fields: dict[str, Any], sometimes: list[int]) -> Any:
    """Losses and weights of steps whose first so many samples use all parameters, and each step's collectives."""
    engine = ts.parallelize(Wide().double(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=squares)
    losses, calls = [], []
    for step, used in enumerate(sometimes):
        batch = data(step, sometimes=used)
        before = len(strict_nccl.log())
        parts = [t.double().chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for t in batch]
        losses.append(engine.step(*parts).item())
        calls.append(strict_nccl.log()[before:])
    return losses, {name: value.clone() for name, value in engine.model.state_dict().items()}, calls


def _reductions_before_statistics(calls: list[Any]) -> int:
    """How many reductions of large gradients come before the last statistics of a batch normalization."""
    statistics = ([("torch.float64", 1040)], [("torch.float64", 1040)])  # of a backward
    last = max(place for place, call in enumerate(calls) if call.shapes == statistics)
    return sum("reduce_scatter" in call.name for call in calls[:last])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(zero=1), dict(zero=2, micro_batches=2)])
def test_gradients_wait_for_statistics_only_where_ranks_differ(ranks, fields):
    used = [8, 8, 4, 8, 0, 8]
    found = ranks(2, _with_log, fields, used, backend=strict_nccl.NAME)
    losses, state, calls = found[0]
    expected = ranks(2, _with_log, dict(fields, zero=0), used)[0]
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-6)
    parity.assert_same_state(state, expected[1], 1e-5)
    if "micro_batches" in fields:
        return  # the first micro-batch's reductions come before the second's statistics
    for step, number in enumerate(used):
        assert (_reductions_before_statistics(calls[step]) > 0) == (number == 8), step


# -- a call that one rank makes alone --


def _lone_mean(output: torch.Tensor, targets: torch.Tensor) -> Any:
    if dist.get_rank() == 0:
        output.mean()  # logits are split over the ranks, so that this gathers them
    return next_token_loss(output, targets)


def _plain(output: torch.Tensor, targets: torch.Tensor) -> Any:
    return next_token_loss(output, targets)


_LONE: dict[str, Any] = {
    "engine.step": lambda engine, inputs, targets: engine.step(inputs, targets),
    "engine.evaluate": lambda engine, inputs, targets: engine.evaluate(inputs, targets),
    "engine.full_state_dict": lambda engine, inputs, targets: engine.full_state_dict(),
    "engine.save": lambda engine, inputs, targets: engine.save("nowhere"),
}


def _lone_call(kind: str) -> tuple[str, float]:
    """What each rank says of what rank 0 calls alone, and after how many seconds. The world outlives it."""
    fields = dict(tp=2, dp_shard=1) if kind == "mean of split logits" else dict(zero=1)
    torch.manual_seed(1)
    loss_fn = _lone_mean if kind == "mean of split logits" else _plain
    engine = ts.parallelize(
        lambda: GPT(61, 16, 2, 2, 30), ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, timeout=3
    )
    for group in {engine.mesh.world_group, engine.mesh.dp_group}:
        set_group_timeout(group, timedelta(seconds=3))  # the fixture's own world
    inputs, targets = parity.batch("gpt", 0, 4)
    started = time.monotonic()
    try:
        if kind in _LONE:
            if dist.get_rank() == 0:
                try:
                    _LONE[kind](engine, inputs, targets)
                finally:
                    default_store().set(f"alone in {kind}", "over")
            else:  # is there for as long as rank 0 waits: a rank that has ended is told in other words
                default_store().wait([f"alone in {kind}"], timedelta(seconds=60))
        elif kind == "ranks out of step":
            (engine.full_state_dict if dist.get_rank() == 0 else partial(engine.step, inputs, targets))()
        else:
            engine.step(inputs, targets)
        message = "nothing"
    except RuntimeError as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return message, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean of split logits", "ranks out of step", *_LONE])
def test_a_call_that_one_rank_makes_alone_names_itself_within_the_timeout(ranks, kind):
    found = ranks(2, _lone_call, kind)
    for message, seconds in found if kind not in _LONE else found[:1]:
        assert kind not in _LONE or f"{kind} is a collective: every rank must call it" in message
        assert kind not in _LONE or "ran out of batches before this one" in message
        assert "could not finish the" in message and "Every rank of a group must make the same calls" in message
        assert seconds < 60


@pytest.mark.parametrize("timeout", [0, -1.0, "long", True, float("nan")])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises((TypeError, ValueError), match=r"timeout=.* was given; it must be"):
        ts.parallelize(nn.Linear(2, 2), ts.Plan(), optimizer=ADAMW, loss_fn=squares, timeout=timeout)


def _timeouts() -> list[float]:
    engine = ts.parallelize(
        nn.Linear(4, 4),
        ts.Plan(dp_replicate=2, zero=1),
        optimizer=ADAMW,
        loss_fn=squares,
        timeout=timedelta(seconds=77),
    )
    groups = [engine.mesh.group("dp_shard"), engine.mesh.group("dp_replicate")]
    return [group_timeout(group, torch.device("cpu")).total_seconds() for group in groups]


def test_the_timeout_reaches_the_groups(ranks):
    assert ranks(4, _timeouts) == [[77.0, 77.0]] * 4
