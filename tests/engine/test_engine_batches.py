"""Batches of any form and size, and losses that weigh samples."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from engines import ADAMW, LEVELS, assert_same_state, engine_of, own_shard
from toys import Regular, data, plain_loop, squares


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": self.layer(x + y), "difference": self.layer(x - y)}


def _two_losses(output: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    return squares(output["sum"], targets["a"]) + squares(output["difference"], targets["b"])


def _forms() -> list[float]:
    engine = engine_of(TwoInputs(), partial(torch.optim.SGD, lr=0.0), _two_losses, micro_batches=2)
    x, a = own_shard(engine, *data(0))
    y, b = own_shard(engine, *data(1))
    targets = {"a": a, "b": b}
    return [engine.step(inputs, targets).item() for inputs in ((x, y), [x, y], {"y": y, "x": x})]


def test_inputs_may_be_tuples_and_dicts(ranks):
    (x, a), (y, b) = data(0), data(1)
    expected = _two_losses(TwoInputs()(x, y), {"a": a, "b": b}).item()
    assert ranks(2, _forms)[0] == pytest.approx([expected] * 3, rel=1e-5)


def _weighted(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples count by a weight, which sum to less than one."""
    weights = targets[:, 0].abs() / 100
    return ((output - targets).square().mean(1) * weights).sum(), weights.sum()


def _loss_and_state(loss_fn: Any, sizes: list[int], fields: dict[str, Any]) -> tuple:
    engine = engine_of(Regular(), loss_fn=loss_fn, **fields)
    losses = []
    for step in range(3):
        parts = [t.split(sizes)[engine.mesh.dp_rank] for t in data(step, sum(sizes))]
        losses.append(engine.step(*parts).item())
    return losses, engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_fn", [squares, _weighted])
def test_ranks_may_have_different_numbers_of_samples(ranks, loss_fn, level):
    losses, state = ranks(2, _loss_and_state, loss_fn, [3, 2], dict(zero=level))[0]
    model = Regular()
    mean = loss_fn if loss_fn is squares else lambda output, targets: torch.div(*_weighted(output, targets))
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step, 5)] for step in range(3)], loss_fn=mean))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


def test_micro_batches_of_different_weight(ranks):
    losses, state = ranks(2, _loss_and_state, _weighted, [6, 3], dict(zero=2, micro_batches=3))[0]
    model = Regular()
    mean = lambda output, targets: torch.div(*_weighted(output, targets))  # noqa: E731
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step, 9)] for step in range(3)], loss_fn=mean))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


def _nothing_counts() -> float:
    engine = parity.make_engine("gpt", dict(zero=1))
    inputs, targets = parity.batch("gpt", 0)
    return engine.step(*parity.shard(engine, inputs, torch.full_like(targets, -100))).item()


def test_a_batch_in_which_nothing_counts_has_a_loss_of_zero(ranks):
    assert ranks(2, _nothing_counts) == [0.0, 0.0]


class _OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inlet(x)))


def _sum_and_count(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output.values() - targets.values()).square().sum(), targets.values().numel()


def _nested(fields: dict[str, Any]) -> list[float] | str:
    engine = ts.parallelize(_OfTokens(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=_sum_and_count)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(2, 9, (8,), generator=generator).tolist()
        samples = [[torch.randn(n, width, generator=generator) for n in lengths] for width in (6, 3)]
        mine = slice(
            8 * engine.mesh.dp_rank // engine.mesh.dp_size, 8 * (engine.mesh.dp_rank + 1) // engine.mesh.dp_size
        )
        batch = [torch.nested.as_nested_tensor(each[mine], layout=torch.jagged) for each in samples]
        try:
            losses.append(engine.step(*batch).item())
        except ValueError as error:
            return str(error)
    return losses


@pytest.mark.parametrize(
    "fields", [dict(zero=1), dict(zero=3, micro_batches=2), dict(zero=3, recompute="full")], ids=str
)
def test_nested_tensors_are_batches(ranks, fields):
    assert ranks(2, _nested, fields)[0] == pytest.approx(ranks(1, _nested, {})[0], rel=1e-5)


def test_nested_tensors_are_refused_where_layers_have_one_shape(ranks):
    for said in ranks(2, _nested, dict(tp=2)):
        assert "nested tensor of jagged layout under tp" in said and "zero=1 to 3" in said
