"""What is held and computed in which type: masters, reductions, fp64, and fp16 with its loss scale."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
from engines import ADAMW, LEVELS, Operations, assert_same_state, engine_of, local, own_shard, train_odd
from toys import Block, Regular, data, plain_loop, squares


def _bf16_initial(level: int) -> tuple:
    engine = engine_of(Regular(), zero=level, precision="bf16")
    initial = engine.full_state_dict()
    return (
        initial,
        {name: p.dtype for name, p in engine.model.named_parameters()},
        {name: getattr(p, "_local_tensor", p).dtype for name, p in engine.sharded.masters().items()},
    )


@pytest.mark.parametrize("level", LEVELS)
def test_masters_are_fp32_and_frozen_ones_keep_their_digits(ranks, level):
    """Modules have what forwards compute with, at every level."""
    initial, shown, masters = ranks(2, _bf16_initial, level)[0]
    assert_same_state(initial, Regular().state_dict(), 0.0)
    assert set(masters.values()) == {torch.float32}
    assert set(shown.values()) == {torch.bfloat16}


def _unsharded_reduction() -> dict[str, torch.dtype]:
    sums: dict[str, torch.dtype] = {}
    for name in ("fp32", "bf16"):
        engine = engine_of(Regular(), zero=1, reduce_dtype=name)
        with Operations() as operations:
            engine.step(*own_shard(engine, *data(0)))
        sums[name] = torch.bfloat16 in operations.dtypes
    return sums


def test_reduce_dtype_is_not_ignored_in_fp32(ranks):
    assert ranks(2, _unsharded_reduction)[0] == {"fp32": False, "bf16": True}


class Fp64(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.double())


@pytest.mark.parametrize("level", [0, 2, 3])
def test_fp64_stays_fp64(ranks, level):
    losses, state = ranks(2, train_odd, Fp64, dict(zero=level), None)[0]
    model = Fp64()
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(4)]))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0.0)
    assert_same_state(state, model.state_dict(), 1e-10)


def _fp16_parity(level: int) -> list[float]:
    engine = parity.make_engine("vit", dict(zero=level, precision="fp16", clip_grad_norm=1.0))
    assert engine.scaler is not None
    engine.scaler.scale = 2.0**12  # no seed's gradients overflow
    losses = [engine.step(*parity.shard(engine, *parity.batch("vit", step))).item() for step in range(8)]
    assert engine.scaler.scale == 2.0**12
    return losses


@pytest.mark.parametrize("level", LEVELS)
def test_fp16_trains(ranks, level):
    expected = parity.reference("vit", 1.0, steps=8)["losses"]
    assert ranks(2, _fp16_parity, level)[0] == pytest.approx(expected, rel=1e-2)


def _overflow(level: int) -> tuple:
    engine = engine_of(Block(6), loss_fn=_of_rank_1, zero=level, precision="fp16")
    assert engine.scaler is not None
    scales, changed = [], []
    inputs, targets = own_shard(engine, data(0)[0], torch.zeros(8, 6))
    for _ in range(12):
        before = [local(p).clone() for p in engine.sharded.masters().values()]
        engine.step(inputs, targets)
        after = [local(p) for p in engine.sharded.masters().values()]
        scales.append(engine.scaler.scale)
        changed.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return scales, changed, engine.step_count, [local(p).isfinite().all().item() for p in engine.model.parameters()]


def _of_rank_1(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Gradients that overflow in fp16 at the initial scale, on one rank alone."""
    return squares(output, targets) * (2.0**7 if dist.get_rank() == 1 else 2.0**-7)


@pytest.mark.parametrize("level", LEVELS)
def test_fp16_skips_steps_that_overflow_on_any_rank_and_goes_on(ranks, level):
    first, second = ranks(2, _overflow, level)
    scales, changed, steps, finite = first
    assert second[0] == scales and all(finite) and steps == 12
    skipped = changed.index(True)
    assert 1 <= skipped < 12
    assert scales[:skipped] == [2.0 ** (15 - i) for i in range(skipped)]  # halved each time
    assert all(changed[skipped:]) and set(scales[skipped:]) == {scales[skipped - 1]}
    if level in (0, 3):  # what forward computes with is on every rank
        assert second[1][skipped]
