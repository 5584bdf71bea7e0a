"""Parameters as real models have them: frozen, unused, tied, uneven, scalar, used by some batches or ranks alone."""

import pytest
import torch
from torch import nn

import parity
from engines import ADAMW, LEVELS, assert_same_state, train_odd
from toys import Odd, Regular, data, plain_loop


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, dict(micro_batches=4)),
        (2, dict(zero=0, micro_batches=2)),
        (2, dict(zero=2, micro_batches=4, clip_grad_norm=0.5)),
        (2, dict(dp_replicate=2, dp_shard=1, zero=2, micro_batches=4)),
        (4, dict(zero=0)),
        (4, dict(zero=1, micro_batches=2)),
        (4, dict(zero=2)),
        (4, dict(zero=3, micro_batches=2, clip_grad_norm=0.5)),
        (4, dict(dp_replicate=2, zero=1, clip_grad_norm=0.5)),
        (4, dict(dp_replicate=2, zero=3, micro_batches=2)),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_frozen_unused_tied_uneven_and_scalar_parameters(ranks, world_size, fields):
    losses, state = ranks(world_size, train_odd, Regular, fields, None)[0]
    model = Regular()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [[data(step)] for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps, clip=fields.get("clip_grad_norm")))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())
    for name in ("frozen.weight", "never.weight", "never_wide"):  # without a gradient there is no weight decay either
        assert torch.equal(state[name], before[name])
    assert "mask" not in state


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=2), dict(zero=1, dp_replicate=2)])
def test_parameters_that_only_one_rank_uses(ranks, fields):
    losses, state = ranks(4, train_odd, Odd, fields, 2)[0]
    model = Odd()
    steps = [list(zip(*(t.chunk(4) for t in data(step, sometimes=2)), strict=True)) for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=2)])
def test_parameters_that_only_one_micro_batch_uses(ranks, fields):
    losses, state = ranks(1, train_odd, Odd, dict(micro_batches=4, **fields), 2)[0]
    model = Odd()
    steps = [list(zip(*(t.chunk(4) for t in data(step, sometimes=2)), strict=True)) for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.recurrent = nn.LSTM(6, 5, 2, batch_first=True)  # keeps its weights in a list as well
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x[:, None])[0][:, 0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_recurrent_network(ranks, level):
    losses, state = ranks(2, train_odd, Recurrent, dict(zero=level), None)[0]
    model = Recurrent()
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(4)]))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


def _buffers() -> dict[str, torch.Tensor]:
    engine = parity.make_engine("resnet", dict(zero=1))
    for step in range(2):
        engine.step(*parity.shard(engine, *parity.batch("resnet", step)))
    return {name: buffer.clone() for name, buffer in engine.model.named_buffers()}


def test_running_statistics_are_the_same_on_every_rank(ranks):
    first, second = ranks(2, _buffers)
    assert any(name.endswith("running_var") for name in first)
    assert_same_state(first, second, 0.0)


class StepRunner(nn.Module):
    """Never calls the blocks themselves, but what is in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet = nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block[1](block[0](x))
        return x


@pytest.mark.parametrize("level", [0, 1, 2])
def test_units_that_are_never_called_train(ranks, level):
    """Their parts are used alone. What stands for the unit is never called, so that no hook of it waits for gathers."""
    losses, state = ranks(2, train_odd, StepRunner, dict(zero=level), None)[0]
    model = StepRunner()
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(4)]))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    assert_same_state(state, model.state_dict())
