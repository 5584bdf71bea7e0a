"""What optimizers couple is found on small tensors: nothing, the elements of a tensor, or several tensors."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import optimizers
import seeds
import tensorshard as ts
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.guards.optimizer_probe import members_that_need_wholes
from tensorshard.engine.optimizer import build_optimizer


class ByRow(optimizers.Own):
    """Each row by its norm: exact for any shard of rows."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / (g.norm(dim=-1, keepdim=True) + 1e-6) if p.ndim > 1 else g, alpha=group["lr"])


class Factors(optimizers.Own):
    """Has factors of matrices with 128 rows and columns or more alone, as some Adafactors do."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        wide = p.ndim == 2 and min(p.shape) >= 128
        scale = g.square().mean(1, keepdim=True) * g.square().mean(0) / g.square().mean() if wide else g.square()
        p.sub_(g / (scale.sqrt() + 1e-3), alpha=group["lr"])


def by_size(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Takes large matrices out by their size, which small tensors do not have."""
    large = [p for p in parameters if p.ndim == 2 and p.numel() >= 512]
    return [optimizers.Muon(large), torch.optim.AdamW([p for p in parameters if not any(p is q for q in large)])]


def _model() -> nn.Module:
    seeds.seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Linear(16, 4))


def _owned(make: Any, fields: dict[str, Any]) -> Any:
    try:
        engine = ts.parallelize(_model(), ts.Plan(**fields), optimizer=make, loss_fn=nn.functional.mse_loss)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return [] if engine._owners is None else sorted(engine._owners.names)


MATRICES = ["0.weight", "2.weight", "3.weight"]
ALL = sorted([*MATRICES, "0.bias", "2.bias", "3.bias"])


@pytest.mark.slow_cases("tp-EightBits", "tp-LateShampoo", "zero=1-Lamb", "zero=3-Muon", "tp-Lion", "zero=1-Factors")
@pytest.mark.parametrize(
    ("make", "fields", "expected"),
    [
        pytest.param(optimizers.Lion, dict(zero=1), [], id="zero=1-Lion"),
        pytest.param(optimizers.Lion, dict(tp=2), [], id="tp-Lion"),
        pytest.param(optimizers.LionByHand, dict(zero=3), ALL, id="zero=3-LionByHand"),
        pytest.param(optimizers.LionByHand, dict(tp=2), [], id="tp-LionByHand"),
        pytest.param(ByRow, dict(zero=1), [], id="zero=1-ByRow"),
        pytest.param(ByRow, dict(tp=2), ALL, id="tp-ByRow"),
        pytest.param(Factors, dict(zero=1), ALL, id="zero=1-Factors"),
        pytest.param(optimizers.EightBits, dict(tp=2), ALL, id="tp-EightBits"),
        pytest.param(optimizers.LateShampoo, dict(tp=2), ALL, id="tp-LateShampoo"),
        pytest.param(optimizers.Lamb, dict(zero=1), ALL, id="zero=1-Lamb"),
        pytest.param(optimizers.Muon, dict(zero=3), ALL, id="zero=3-Muon"),
        pytest.param(by_size, dict(zero=2), MATRICES[:2], id="zero=2-by_size"),
        pytest.param(optimizers.muon_and_adamw, dict(tp=2), MATRICES, id="tp-muon_and_adamw"),
        pytest.param(optimizers.OneRate, dict(zero=0), [], id="zero=0-OneRate"),
        pytest.param(optimizers.Rounded, dict(zero=0), [], id="zero=0-Rounded"),
    ],
)
def test_only_what_needs_whole_tensors_gets_them(ranks, make, fields, expected):
    for found in ranks(2, _owned, make, fields):
        assert found == expected


@pytest.mark.slow_cases("tp-OneRate", "zero=1-ClippedLamb", "tp-Rounded")
@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        pytest.param(optimizers.OneRate, dict(tp=2), ("tp=2 ", "OneRate couples several"), id="tp-OneRate"),
        pytest.param(optimizers.OneRate, dict(zero=3), ("zero=3 ", "OneRate couples several"), id="zero=3-OneRate"),
        pytest.param(optimizers.OneRate, dict(pp=2), ("pp=2 ", "OneRate couples", "pp=1"), id="pp-OneRate"),
        pytest.param(optimizers.ClippedLamb, dict(zero=1), ("clip_grad_norm=", "zero=0"), id="zero=1-ClippedLamb"),
        pytest.param(optimizers.Rounded, dict(zero=1), ("Rounded draws random numbers",), id="zero=1-Rounded"),
        pytest.param(optimizers.Rounded, dict(tp=2), ("Rounded draws random numbers",), id="tp-Rounded"),
        pytest.param(partial(optimizers.Lamb, lr=None), dict(tp=2), ("Lamb could not be tried",), id="tp-fails"),
    ],
)
def test_what_couples_several_tensors_or_draws_numbers_is_refused(ranks, make, fields, words):
    fields = {**fields, "micro_batches": 2} if "pp" in fields else fields
    for message in ranks(2, _owned, make, fields):
        assert "UnsuitableOptimizerError" in message and "AdamW" in message
        assert all(word in message for word in words), message


class _Counter(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def _operators(make: Any) -> int:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])
    engine = ts.parallelize(model, ts.Plan(tp=2), optimizer=torch.optim.SGD, loss_fn=nn.functional.mse_loss)
    sharded: ShardedModel = engine.sharded
    build = partial(build_optimizer, make)
    optimizer = build(sharded.masters())
    with _Counter() as counter:
        members_that_need_wholes(optimizer, build, sharded.masters(), sharded.split, {"tp": 2}, engine.mesh.world_group)
    return counter.operators


@pytest.mark.slow
@pytest.mark.parametrize("make, most", [(optimizers.Lion, 5000), (optimizers.Shampoo, 8000)])
def test_it_costs_little(ranks, make, most):
    assert max(ranks(2, _operators, make)) < most  # of 200 parameters; 0.05 s
