"""Parallel layers that were built by hand, under a Plan: its tensor-parallel ranks are theirs."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorshard as ts
from parity import assert_same_state
from rank_pool import RankError


def _model(split: bool) -> nn.Module:
    torch.manual_seed(0)
    if not split:
        return nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Identity(), nn.Linear(11, 6), nn.LayerNorm(6))
    up, down = ts.nn.ParallelLinear(6, 11, dim=1), ts.nn.ParallelLinear(11, 6, dim=0)
    return nn.Sequential(up, nn.GELU(), ts.nn.RegisterParallelDim(-1), down, nn.LayerNorm(6))


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def _reference(steps: int) -> dict[str, torch.Tensor]:
    model = _model(split=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        _loss(*(model(_batch(step)[0]), _batch(step)[1])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model.state_dict()


def _engine(split: bool, **fields: object) -> ts.Engine:
    plan = ts.Plan(clip_grad_norm=0.05, **fields)
    return ts.parallelize(_model(split), plan, optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-3), loss_fn=_loss)


def _train(path: str, split: bool, first: int, fields: dict) -> dict[str, torch.Tensor]:
    if split:
        ts.init_process_group(2)
    engine = _engine(split, **fields)
    if first:
        engine.load(path)
    for step in range(first, first + 2):
        mine = [part.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in _batch(step)]
        engine.step(*mine)
    engine.save(path + "-on" if first else path)
    return engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "zero"), [(2, 0), (4, 1), (4, 3)])
def test_training_saving_and_loading(ranks, tmp_path, world, zero):
    """Weights, clipping and checkpoints are those of the model that is not parallel, which reads them."""
    path = str(tmp_path / "step")
    fields = {"tp": 2, "zero": zero, "dp_shard": world // 2}
    assert_same_state(ranks(world, _train, path, True, 0, fields)[0], _reference(2), 1e-5)
    assert_same_state(ranks(1, _train, path, False, 2, {})[0], _reference(4), 1e-5)


def _bad(fields: dict, callable_too: bool = False) -> None:
    ts.init_process_group(2)
    model = partial(_model, True) if callable_too else _model(True)
    ts.parallelize(model, ts.Plan(**fields), optimizer=torch.optim.AdamW, loss_fn=_loss)


@pytest.mark.parametrize(
    ("world", "fields", "built_inside", "message"),
    [
        (2, {"dp_shard": 2}, False, "split over 2 ranks already, but a plan makes its own groups"),
        (4, {"tp": 4}, False, r"split over the ranks \[0, 1\] already, .* are \[0, 1, 2, 3\]: use tp=2"),
        (4, {"tp": 2, "pp": 2, "micro_batches": 2}, False, "split by hand, and this plan has pp=2"),
        (2, {"tp": 2}, True, "build it before parallelize, with tp=2"),
    ],
)
def test_plans_that_do_not_fit(ranks, world, fields, built_inside, message):
    with pytest.raises(RankError, match=message):
        ranks(world, _bad, fields, built_inside)
