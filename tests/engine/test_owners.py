"""Whole parameters are made of every rank's pieces, and go back there."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import optimizers
import parity
import seeds
import tensorshard as ts
from engines import assert_same_state, engine_of, own_shard
from tensorshard.engine.owners import pieces_of
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.rank_estimate import OPTIMIZER
from tensorshard.tensor_parallel.table.layouts import Layout, local_shard
from toys import Odd, Regular, data, plain_loop


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((7, 5), Layout()),
        ((7, 6), Layout(1, (6,))),
        ((12, 3), Layout(0, (12,))),
        ((11, 2, 3), Layout(0, (4, 4, 3))),
        ((2, 11), Layout(1, (4, 4, 3))),
        ((1,), Layout()),
        ((), Layout()),
    ],
    ids=str,
)
@pytest.mark.parametrize("data_ranks", [1, 2, 3])
def test_pieces_are_where_the_parts_of_all_ranks_are(shape, layout, data_ranks):
    full = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    whole, times = torch.zeros(shape), torch.zeros(shape)
    for tensor in range(2 if layout.dim is not None else 1):
        part = local_shard(full, layout, tensor, 2)
        for index in range(data_ranks):
            rows = part if not shape else part[-(-len(part) // data_ranks) * index :][: -(-len(part) // data_ranks)]
            if not shape and index:
                continue
            for piece in pieces_of(shape, layout, (tensor, 2), (index, data_ranks)):
                assert rows[piece.local].shape == piece.shape == whole[piece.whole].shape
                whole[piece.whole] = rows[piece.local]
                times[piece.whole] += 1
    assert torch.equal(whole, full) and (times == 1).all()


def _loop(fields: dict[str, Any]) -> tuple[Any, list[float]]:
    """A loop with groups, a schedule, accumulation, and parameters that some steps do not use."""
    engine = engine_of(Odd(), _by_dimension, **fields)
    scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        x, y = own_shard(engine, *data(step, sometimes=8 if step % 2 else 0))
        engine.backward((engine.model(x) - y).square().mean())
        engine.optimizer.step()
        assert any(p.grad is not None for p in engine.model.parameters())
        engine.optimizer.zero_grad()
        assert all(p.grad is None for p in engine.model.parameters())
        scheduler.step()
    return engine.full_state_dict(), [group["lr"] for group in engine.optimizer.param_groups]


def _by_dimension(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "lr": 0.01},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.02},
    ]
    return optimizers.Lamb(groups)


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_loop_of_ones_own_with_unused_parameters_and_a_schedule(ranks, level):
    state, rates = ranks(2, _loop, dict(zero=level))[0]
    model = Odd()
    optimizer = _by_dimension([p for p in model.parameters() if p.requires_grad])
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        list(plain_loop(model, optimizer, [[data(step, sometimes=8 if step % 2 else 0)]]))
        scheduler.step()
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert_same_state(state, model.state_dict())


def _thaw(fields: dict[str, Any]) -> Any:
    engine = engine_of(Regular(), optimizers.Lamb, **fields)
    for step in range(4):
        if step == 2:
            engine.model.frozen.weight.requires_grad_(True)
            engine.model.narrow.bias.requires_grad_(False)
        engine.step(*own_shard(engine, *data(step)))
    return engine.full_state_dict()


@pytest.mark.parametrize("level", [1, 3])
def test_parameters_that_are_frozen_and_trained_later(ranks, level):
    found = ranks(2, _thaw, dict(zero=level))[0]
    model = Regular()
    optimizer = optimizers.Lamb([p for n, p in model.named_parameters() if p.requires_grad or n == "frozen.weight"])
    list(plain_loop(model, optimizer, [[data(step)] for step in range(2)]))
    model.frozen.weight.requires_grad_(True)
    model.narrow.bias.requires_grad_(False)
    list(plain_loop(model, optimizer, [[data(step)] for step in range(2, 4)]))
    assert_same_state(found, model.state_dict())


def _evaluated(fields: dict[str, Any]) -> Any:
    engine = engine_of(Regular(), optimizers.NormalizedScheduleFree, **fields)
    for step in range(3):
        engine.optimizer.train()
        engine.step(*own_shard(engine, *data(step)))
        engine.optimizer.eval()
    return engine.full_state_dict(), engine.evaluate(*own_shard(engine, *data(9))).item()


@pytest.mark.parametrize("fields", [dict(zero=2), pytest.param(dict(zero=3), marks=pytest.mark.slow)], ids=str)
def test_methods_beside_step_see_whole_parameters(ranks, fields):
    state, loss = ranks(2, _evaluated, fields)[0]
    expected, alone = ranks(1, _evaluated, dict(zero=0))[0]
    assert_same_state(state, expected)
    assert loss == pytest.approx(alone, rel=1e-5)


def _gpt_engine(fields: dict[str, Any]) -> ts.Engine:
    seeds.seed(3)
    return ts.parallelize(
        GPT(61, 16, 2, 2, 36).double(), ts.Plan(**fields), optimizer=_combined, loss_fn=next_token_loss
    )


def _combined(named_parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    shampoo = [p for n, p in named_parameters if "mlp" in n]
    schedule_free = [p for n, p in named_parameters if "attention" in n]
    rest = [p for n, p in named_parameters if "mlp" not in n and "attention" not in n]
    return [
        optimizers.Shampoo(shampoo),
        optimizers.NormalizedScheduleFree(schedule_free),
        torch.optim.AdamW(rest, lr=1e-3, eps=1e-4),
    ]


def _steps(engine: ts.Engine, start: int) -> Any:
    engine.optimizer.train()
    for step in range(start, start + 3):
        engine.step(*parity.shard(engine, *parity.batch("gpt", step)))
    return engine.full_state_dict()


def _save(fields: dict[str, Any], folder: str) -> Any:
    engine = _gpt_engine(fields)
    _steps(engine, 0)
    engine.save(folder)
    return _steps(engine, 3)


def _load(fields: dict[str, Any], folder: str) -> Any:
    engine = _gpt_engine(fields)
    engine.load(folder)
    return _steps(engine, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param((2, dict(zero=2)), (2, dict(tp=2)), id="zero2-tp"),
        pytest.param((1, dict(zero=0)), (2, dict(zero=2)), id="plain-zero2"),
        pytest.param((2, dict(tp=2)), (1, dict(zero=0)), id="tp-plain"),
        pytest.param((4, dict(tp=2, zero=3)), (2, dict(pp=2, micro_batches=2)), id="tp_zero3-pp"),
        pytest.param((2, dict(pp=2, micro_batches=2)), (4, dict(zero=3, dp_replicate=2)), id="pp-hybrid"),
    ],
)
def test_a_checkpoint_is_read_under_any_plan(ranks, tmp_path: Path, written, read):
    folder = str(tmp_path / "checkpoint")
    expected = ranks(written[0], _save, written[1], folder)[0]
    found = ranks(read[0], _load, read[1], folder)[0]
    parity.assert_same_state(found, expected, 1e-5)


def _held_states() -> tuple[int, int]:
    engine = _gpt_engine(dict(zero=2))
    _steps(engine, 0)
    states = [s for state in engine.optimizer.state.values() for s in state.values() if isinstance(s, torch.Tensor)]
    wholes = engine._owners.parameters.values()
    return sum(s.nbytes for s in states), sum(p.untyped_storage().nbytes() for p in wholes)


def test_ranks_share_the_states_and_hold_no_whole_weights_between_updates(ranks):
    held = ranks(2, _held_states)
    assert max(states for states, _ in held) < 1.2 * min(states for states, _ in held)
    assert all(weights < 1000 for _, weights in held)


@pytest.mark.slow
def test_an_estimate_holds_what_the_largest_owner_does():
    fields = dict(zero=3)
    estimate = ts.estimate(
        partial(GPT, 61, 16, 2, 2, 36),
        ts.Plan(**fields),
        world_size=2,
        inputs=torch.zeros(4, 12, dtype=torch.long),
        targets=torch.zeros(4, 12, dtype=torch.long),
        optimizer=optimizers.Lamb,
        loss_fn=next_token_loss,
    )
    numel = sum(p.numel() for p in GPT(61, 16, 2, 2, 36).parameters())
    states = max(rank.by_category[OPTIMIZER] for rank in estimate.ranks)
    assert states == pytest.approx(2 * 4 * numel / 2, rel=0.05)


def _offloaded(make: Any, fields: dict[str, Any]) -> Any:
    try:
        engine = engine_of(Regular(), make, **fields)
    except ValueError as error:
        return str(error)
    for step in range(3):
        engine.step(*own_shard(engine, *data(step)))
    return engine.full_state_dict()


def test_offload_of_what_needs_whole_tensors_is_refused_where_they_are_split(ranks):
    for message in ranks(2, _offloaded, optimizers.Lamb, dict(zero=2, offload="cpu")):
        assert "offload was given with Lamb, which needs whole tensors" in message and "offload=None" in message


def test_offload_of_several_optimizers_is_exact_where_nothing_is_split(ranks):
    found = ranks(1, _offloaded, _muon_and_adamw, dict(zero=0, offload="cpu"))[0]
    expected = ranks(1, _offloaded, _muon_and_adamw, dict(zero=0))[0]
    assert_same_state(found, expected, 1e-7)


def _muon_and_adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        optimizers.Muon([p for p in parameters if p.ndim == 2]),
        torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=1e-2, eps=1e-3),
    ]
