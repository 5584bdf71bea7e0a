"""After a step that failed on every rank, the same engine goes on exactly, and another one can be made."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise MemoryError("in backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 160)  # large enough that the layers' gradients travel alone
        self.norm = nn.BatchNorm1d(160)
        self.down = nn.Linear(160, 8)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise MemoryError("in forward")
        h = self.up(x)
        if self.where == "backward":
            h = _Fails.apply(h)
        return x + self.down(torch.relu(self.norm(h)))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.dropout(x)


def _engine(model: nn.Module, **fields: Any) -> ts.Engine:
    return ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=nn.functional.mse_loss)


def _batch(engine: ts.Engine, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    mesh = engine.mesh
    return [torch.randn(8, 8, generator=generator).chunk(mesh.dp_size)[mesh.dp_rank] for _ in range(2)]


def _losses(fields: dict[str, Any], failures: list[tuple[int, str]]) -> tuple[list[float], list[float]]:
    """Losses of an engine whose steps failed before each good one, and of another made after it is gone."""

    def run(failing: bool) -> list[float]:
        model = Failing()
        engine = _engine(model, **fields)
        losses = []
        for step in range(3):
            for index, where in failures if failing else []:
                model.blocks[index].where = where
                with pytest.raises(MemoryError, match=where):
                    engine.step(*_batch(engine, 7 + step))
                model.blocks[index].where = ""
            losses.append(engine.step(*_batch(engine, step)).item())
        if failing:  # the last thing that this engine does
            model.blocks[1].where = "backward"
            with pytest.raises(MemoryError):
                engine.step(*_batch(engine, 9))
        return losses

    interrupted = run(failing=True)
    gc.collect()
    return interrupted, run(failing=False)


PLANS: list[dict[str, Any]] = [
    dict(zero=0),
    dict(zero=0, precision="bf16"),
    dict(zero=1, micro_batches=2),
    dict(zero=2, micro_batches=2),
    dict(zero=3),
    dict(zero=3, micro_batches=2, recompute="full"),
    dict(tp=2, tp_plan={"blocks.*.up": "replicate", "blocks.*.down": "rowwise"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_step_that_failed_on_every_rank_is_as_if_it_had_not_been(ranks, fields):
    failures = [(0, "forward"), (2, "backward"), (1, "backward"), (0, "backward"), (1, "forward")]
    for interrupted, undisturbed in ranks(2, _losses, fields, failures):
        assert interrupted == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=1),
        dict(zero=3),
        dict(dp_replicate=2, zero=2),
    ],
    ids=str,
)
def test_the_same_on_four_ranks(ranks, fields):
    for interrupted, undisturbed in ranks(4, _losses, fields, [(1, "backward"), (2, "forward")]):
        assert interrupted == undisturbed


def _detached(fields: dict[str, Any]) -> tuple[str, float]:
    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output.detach(), targets)

    engine = ts.parallelize(Failing(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn)
    try:
        engine.step(*_batch(engine, 0))
        message = ""
    except ValueError as error:
        message = str(error)
    assert engine.evaluate(*_batch(engine, 0)).isfinite()  # which needs no gradient
    other = _engine(Failing(), **fields)
    return message, other.step(*_batch(other, 0)).item()


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=2), dict(zero=3)], ids=str)
def test_a_detached_loss_is_told_and_the_next_engine_works(ranks, fields):
    for message, loss in ranks(2, _detached, fields):
        assert message.startswith("the loss has no gradient") and ".detach()" in message
        assert loss > 0


def _dropped_at_once(zero: int) -> list[float]:
    """What an engine has under way when it is dropped must not reach the next one."""
    losses = []
    for _ in range(4):
        engine = _engine(Failing(), zero=zero)
        losses.append(engine.step(*_batch(engine, 0)).item())
        del engine
        gc.collect()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_engines_can_follow_each_other(ranks, zero):
    for losses in ranks(2, _dropped_at_once, zero):
        assert len(set(losses)) == 1
