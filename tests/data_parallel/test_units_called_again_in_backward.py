"""ZeRO 3 under reentrant checkpointing, which calls blocks again in the backward."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity
import seeds
from engines import ADAMW, engine_of
from tensorshard.comm.groups import CollectiveMismatchError
from toys import data, squares

STEPS, BLOCKS = 5, 3

# How each block is called in its turn: "c" with a checkpoint, "p" without one.
CALLS = {
    "once": ["c", "c", "c"],
    "twice": ["cc", "cc", "cc"],
    "three times": ["ccc", "ccc", "ccc"],
    "some plainly": ["cp", "p", "pc"],
    "plainly in between": ["cpc", "cc", "pp"],
    "one is never called": ["cc", "", "c"],
}


class Repeated(nn.Module):
    """Calls its blocks one after the other, each as often as `calls` says."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        seeds.seed(4)
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(BLOCKS))
        self.outlet = nn.Linear(6, 3)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block, calls in zip(self.blocks, self.calls, strict=True):
            for how in calls:
                x = x + (checkpoint(block, x, use_reentrant=True) if how == "c" else block(x))
        return self.outlet(x)


def _train(calls: list[str], fields: dict[str, Any]) -> tuple:
    engine = engine_of(Repeated(calls), zero=3, **fields)
    losses = []
    count, rank = engine.mesh.dp_size, engine.mesh.dp_rank
    for step in range(STEPS):
        x, y = (tensor.chunk(count)[rank] for tensor in data(step, 16))
        losses.append(engine.step(x, y).item())
        if step == 2:
            engine.evaluate(x, y)
    return losses, engine.full_state_dict()


def _expected(calls: list[str]) -> tuple:
    model = Repeated(calls)
    optimizer = ADAMW(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = data(step, 16)
        loss = squares(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


FIELDS: list[dict[str, Any]] = [dict(), dict(dp_replicate=2), dict(micro_batches=2), dict(recompute="full")]


@pytest.mark.fast_cases("twice-{'dp_replicate': 2}", "twice-{}")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_blocks_that_are_called_again(ranks, name, fields):
    losses, state = ranks(4 if "dp_replicate" in fields else 2, _train, CALLS[name], fields)[0]
    expected, wanted = _expected(CALLS[name])
    assert losses == pytest.approx(expected, rel=2e-5)
    parity.assert_same_state(state, wanted, 2e-5)


def _skips(since: int, how: str, micro_batches: int) -> tuple[int, str]:
    """The second rank does not call block 1 from a step on. Returns in which step that was refused, and how."""
    engine = engine_of(Repeated(["c", "c", "c"]), zero=3, micro_batches=micro_batches)
    for step in range(since + 2):
        skipped = step >= since and engine.mesh.dp_rank == 1
        engine.model.calls = [how, "" if skipped else how, how]
        try:
            engine.step(*data(step, 8))
        except CollectiveMismatchError as error:
            before = [name for name, p in engine.model.named_parameters() if not p.isfinite().all()]
            assert not before
            engine.model.calls = ["c", "c", "c"]
            engine.step(*data(step, 8))  # all call it again
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("since", [0, 1, 3])
def test_a_block_that_some_ranks_skip_is_refused_on_all(ranks, since, micro_batches):
    for step, message in ranks(2, _skips, since, "c", micro_batches):
        assert step == since
        assert message.startswith("blocks.1 is called again in the backward") and "use_reentrant=False" in message


@pytest.mark.parametrize("since", [0, 3])
def test_without_checkpoints_it_is_not(ranks, since):
    assert ranks(2, _skips, since, "p", 1) == [(-1, "")] * 2


class _RunAgain(torch.autograd.Function):
    """Runs parts of blocks again in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        ctx.blocks, ctx.inputs = blocks, []
        for block in blocks:
            ctx.inputs.append(x)
            x = x + block(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        for block, given in zip(list(ctx.blocks)[::-1], ctx.inputs[::-1], strict=True):
            with torch.enable_grad():
                x = given.detach().requires_grad_()
                y = x
                for part in block:
                    y = part(y)
            torch.autograd.backward(y, gradient)
            gradient = gradient + x.grad
        return gradient, None


class Reversible(Repeated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(_RunAgain.apply(self.inlet(x), self.blocks))


def _train_reversible(fields: dict[str, Any]) -> list[float]:
    engine = engine_of(Reversible([]), **fields)
    shares = [tensor.chunk(engine.mesh.dp_size) for tensor in data(0, 16)]
    return [engine.step(*(share[engine.mesh.dp_rank] for share in shares)).item() for _ in range(STEPS)]


def test_parts_of_units_that_a_backward_runs_again_compute_in_the_plans_type(ranks):
    [expected, _] = ranks(2, _train_reversible, dict(zero=0, precision="bf16"))
    for losses in ranks(2, _train_reversible, dict(zero=3, precision="bf16")):
        assert losses == pytest.approx(expected, rel=2e-2)
