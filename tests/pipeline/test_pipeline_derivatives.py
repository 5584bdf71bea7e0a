"""Models whose forward computes derivatives: exact where one unit has the whole graph, else refused with the reason."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts


class Forces(nn.Module):
    """A potential, and its derivative by what the module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.net(x)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, slope], -1)


class WithUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.forces, self.out = nn.Linear(6, 6), Forces(), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.forces(self.embed(x).tanh()))


class ByAnother(nn.Module):
    """The derivative goes through two units, and one of them computes it."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 1)

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            energy = self.net(h)
            return torch.cat([energy, *torch.autograd.grad(energy.sum(), x, create_graph=True)], -1)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), ByAnother.Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return self.head(self.embed(x), x)


class Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda each: self.net(each).sum())(x)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        for block in blocks:
            x = x + block(x)
        ctx.blocks = blocks
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _ReversibleWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, blocks: Any) -> torch.Tensor:
        for block in blocks:
            x = x + block(x)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Reversing(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.embed, self.blocks = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.embed(x), self.blocks)


MODELS = {
    "forces": (Forces, {}, "the forward of the model computes a derivative"),
    "another": (ByAnother, dict(pp_units=["embed", "head"]), "by a tensor from outside of it"),
    "transformed": (Transformed, {}, "torch.func transforms"),
    "reversible": (partial(Reversing, _Reversible), {}, "inside of _Reversible.forward"),
    "setup": (partial(Reversing, _ReversibleWithSetup), {}, "inside of _ReversibleWithSetup.forward"),
}


def _run(build: Any, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    try:
        engine = ts.parallelize(
            build(),
            ts.Plan(**fields),
            optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
            loss_fn=lambda output, target: (output.mean(-1) - target).square().mean(),
        )
    except ValueError as error:
        return str(error)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(4):
        batch = torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)
        losses.append(engine.step(*batch).item())
    return losses, engine.full_state_dict()


@pytest.mark.parametrize("case", MODELS)
def test_derivatives_through_several_units_are_refused(ranks, case):
    build, fields, expected = MODELS[case]
    for message in ranks(2, _run, build, dict(pp=2, micro_batches=2, **fields)):
        assert expected in message and "set pp=1" in message and "guessed inputs" not in message


@pytest.mark.parametrize("split", ["forces", "out"])
def test_derivatives_within_a_unit_are_exact(ranks, split):
    losses, weights = ranks(1, _run, WithUnit, dict(micro_batches=2))[0]
    fields = dict(pp=2, micro_batches=2, pp_units=["forces"], pp_split=[split])
    results = ranks(2, _run, WithUnit, fields)
    for found in results:
        assert found[0] == pytest.approx(losses, rel=2e-5)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=2e-5, atol=2e-5)
