"""Gradients that an autograd function of the model returns to parameters which it is given outside of their unit."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorshard as ts


class Adjoint(torch.autograd.Function):
    """A module's output, whose gradients the backward computes by the parameters that forward was given."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *parameters), gradient, allow_unused=True)
        return None, *found


class ByHand(torch.autograd.Function):
    """A linear layer of which the backward is written out."""

    @staticmethod
    def forward(ctx, module, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return None, gradient @ weight, gradient.T @ x, gradient.sum(0)


class Net(nn.Module):
    def __init__(self, function, twice: bool) -> None:
        super().__init__()
        self.function, self.twice = function, twice
        self.first, self.part, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        x = self.function.apply(self.part, self.first(x), *self.part.parameters())
        return self.last(self.part(x) if self.twice else x)


def _loss(output, targets):
    return (output[:, 0] - targets).square().mean()


def _batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, generator=generator)) for _ in range(3)]


def _build(function, twice):
    torch.manual_seed(0)
    return Net(function, twice)


_adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


def _trained(function, twice, fields):
    plan = ts.Plan(**fields, shard_units=["first", "part", "last"])
    engine = ts.parallelize(_build(function, twice), plan, optimizer=_adamw, loss_fn=_loss, device="cpu")
    rank, size = engine.mesh.dp_rank, engine.mesh.dp_size
    for x, y in _batches():
        engine.step(x.chunk(size)[rank], y.chunk(size)[rank])
    return engine.full_state_dict()


@pytest.mark.parametrize("fields", [dict(zero=3), dict(zero=3, micro_batches=2), dict(zero=3, recompute="full")])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("function", [Adjoint, ByHand])
def test_gradients_that_a_function_returns_are_averaged(ranks, function, twice, fields):
    model = _build(function, twice)
    optimizer = _adamw(model.parameters())
    for x, y in _batches():
        _loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = ranks(2, _trained, function, twice, fields)[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=2e-5)
