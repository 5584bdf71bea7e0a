"""Loops of one's own over an Engine's model and optimizer, and steps that fail half-way."""

from typing import Any

import pytest
import torch

from engines import ADAMW, LEVELS, assert_same_state, engine_of, own_shard
from toys import Regular, data, squares


def _raw_loop(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(Regular(), **fields)
    for step in range(3):
        for inputs, targets in zip(*(t.chunk(2) for t in data(step)), strict=True):
            squares(engine.model(*own_shard(engine, inputs)), *own_shard(engine, targets)).backward()
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 0.7)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        with torch.no_grad():
            engine.model(data(0)[0])
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, dict()),
        (2, dict(zero=0)),
        (2, dict(zero=1)),
        (2, dict(zero=2)),
        (2, dict(zero=3)),
        (4, dict(dp_replicate=2)),
    ],
)
def test_a_raw_loop_with_accumulation_and_clipping(ranks, world_size, fields):
    state = ranks(world_size, _raw_loop, fields)[0]
    model = Regular()
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        for inputs, targets in zip(*(t.chunk(2) for t in data(step)), strict=True):
            squares(model(inputs), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        assert norm > 0.7
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(state, model.state_dict())


def _raw_and_step(fields: dict[str, Any]) -> tuple:
    raw, stepped = engine_of(Regular(), **fields), engine_of(Regular(), **fields)
    for step in range(3):
        inputs, targets = own_shard(raw, *data(step))
        squares(raw.model(inputs).float(), targets).backward()
        raw.optimizer.step()
        raw.optimizer.zero_grad()
        stepped.step(inputs, targets)
    return raw.full_state_dict(), stepped.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_a_raw_loop_does_what_step_does(ranks, level):
    raw, stepped = ranks(2, _raw_and_step, dict(zero=level))[0]
    assert_same_state(raw, stepped)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise MemoryError("in backward")


class FailingLoss:
    """Fails where it is told to, in its second call since."""

    where = ""
    calls = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.where and self.calls == 2:
            if self.where == "in forward":
                raise MemoryError(self.where)
            return squares(_FailsInBackward.apply(output), targets)
        return squares(output, targets)


def _after_failures(fields: dict[str, Any], places: list[str]) -> list[tuple[float, float]]:
    """Losses of the steps of an engine that was interrupted before each, and of one that was not."""
    loss_fn = FailingLoss()
    interrupted = engine_of(Regular(), loss_fn=loss_fn, micro_batches=2, **fields)
    undisturbed = engine_of(Regular(), micro_batches=2, **fields)
    losses = []
    for step, where in enumerate(places):
        inputs, targets = own_shard(interrupted, *data(step))
        interrupted.backward(squares(interrupted.model(inputs), targets))  # as a loop of one's own would leave behind
        loss_fn.where, loss_fn.calls = where, 0
        with pytest.raises(MemoryError, match=where):
            interrupted.step(*own_shard(interrupted, *data(7)))
        loss_fn.where = ""
        losses.append((interrupted.step(inputs, targets).item(), undisturbed.step(inputs, targets).item()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_failed_step_leaves_nothing_behind(ranks, level):
    losses = ranks(2, _after_failures, dict(zero=level), ["in forward"] * 2)[0]
    losses += ranks(1, _after_failures, dict(zero=level), ["in forward", "in backward", "in forward"])[0]
    assert all(interrupted == undisturbed for interrupted, undisturbed in losses)
