"""Recomputed and compiled blocks compute what they computed."""

import copy
import unittest.mock
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from engines import Operations, engine_of, own_shard
from tensorshard.passes import recompute
from tensorshard.passes.recompute import Comparison, DifferentValuesError, apply_recompute
from toys import Block, data


def _compiled(fields: dict[str, Any]) -> tuple:
    """Losses without and with compilation, and the modules that were compiled."""
    compiled = []

    def compile(forward: Any) -> Any:  # all but code generation, which takes a C++ compiler and its time
        compiled.append(type(forward.__self__).__name__)
        return original(forward, backend="aot_eager")

    original = torch.compile
    losses = []
    with unittest.mock.patch.object(torch, "compile", compile):
        for chosen in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(Block(4), Block(4)), nn.Linear(4, 3))
            engine = engine_of(model, compile=chosen, **fields)
            losses.append([engine.step(*own_shard(engine, *data(step))).item() for step in range(3)])
    return *losses, compiled


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_compiled_blocks_compute_the_same(ranks, level):
    plain, losses, compiled = ranks(2, _compiled, dict(zero=level))[0]
    assert losses == pytest.approx(plain, rel=1e-5)
    assert compiled == ["Block", "Block"]


def _statistics(mode: str) -> dict[str, torch.Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    plan = ts.Plan(recompute=mode)
    engine = ts.parallelize(model, plan, optimizer=parity.ADAMW, loss_fn=nn.functional.mse_loss)
    inputs = torch.arange(24.0).view(6, 4).sin()
    engine.step(inputs, inputs.cos())
    return {name: value for name, value in engine.full_state_dict().items() if "running" in name}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_running_statistics_of_one_rank_are_taken_once(ranks, mode):
    """On one rank torch's own batch norm runs, which writes to them without saying so."""
    once, found = (ranks(1, _statistics, given)[0] for given in ("none", mode))
    assert len(found) == 4
    for name, value in once.items():
        assert not torch.equal(value, torch.full_like(value, "var" in name))  # where they started
        torch.testing.assert_close(found[name], value)


def _work(mode: str) -> tuple[int, int, list[float]]:
    """Calls of a block's norm, and matrix products, in one step."""
    engine = parity.make_engine("gpt", dict(recompute=mode))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    engine.model.blocks[0].mlp.up.register_forward_hook(count)
    with Operations() as operations:
        loss = engine.step(*parity.batch("gpt", 0))
    return calls, operations.counts["addmm"], [loss.item(), *operations.counts.values()]


def test_recomputation_computes_again(ranks):
    none, selective, full = (ranks(1, _work, mode)[0] for mode in ("none", "selective", "full"))
    assert (none[0], selective[0], full[0]) == (1, 2, 2)
    assert none[1] == selective[1] < full[1]


class InPlace(nn.Module):
    """Changes results of matrix products in place, in the open and (a recurrent layer) out of autograd's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.wide, self.norm, self.narrow = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.rnn(x)[0]).mul_(2.0).relu_()
        return self.narrow(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def _backward(block: nn.Module, *, twice: bool = False) -> list[torch.Tensor]:
    """Gradients and buffers."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(2, 5, 4)
    output = block(x)
    output.add_(1.0)  # the block's last matrix product
    loss = output.square().sum()
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    return [p.grad for p in block.parameters()] + list(block.buffers())  # type: ignore[misc]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_results_that_are_changed_in_place_are_computed_again(mode, twice):
    plain = InPlace().double()
    again = copy.deepcopy(plain)
    apply_recompute([again], mode)
    torch.testing.assert_close(_backward(again, twice=twice), _backward(plain, twice=twice), rtol=1e-12, atol=1e-12)


class BetweenGraphs(nn.Module):
    """Runs as it is in a compiled block, whose code falls into two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.compiler.disable(torch.relu_)(x)


@pytest.mark.filterwarnings("ignore")  # torch's, of what is in the graph
@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), BetweenGraphs()], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_compiled_blocks_that_are_computed_again(mode, activation):
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), activation, nn.Linear(8, 4))
    again = copy.deepcopy(plain)
    apply_recompute([again], mode)
    compiled = torch.compile(again, backend="aot_eager")
    x = torch.linspace(-1, 1, 24).view(6, 4)
    for module in (plain, compiled):
        module(x).square().sum().backward()
    found, expected = ([p.grad for p in m.parameters()] + list(m.buffers()) for m in (again, plain))
    torch.testing.assert_close(found, expected)


def test_attention_with_dropout_is_computed_again(monkeypatch):
    """Its kernel would be left out, and the random numbers that it draws with it: what follows would get them."""
    schema = "attention(Tensor q, float dropout_p=0.0) -> Tensor"
    library = torch.library.Library("tensorshard_tests", "FRAGMENT")
    library.define(schema)
    library.impl("attention", lambda q, dropout_p=0.0: nn.functional.dropout(q, dropout_p), "CompositeExplicitAutograd")
    kernel = torch.ops.tensorshard_tests.attention.default
    monkeypatch.setattr(recompute, "COSTLY", recompute.COSTLY | {kernel})
    results = recompute.CachedResults()
    q = torch.ones(1000)
    comparison = Comparison("a block")
    with recompute.CachesCostly(results, comparison):
        kept = kernel(q, 0.0)
        torch.manual_seed(0)
        first = kernel(q, 0.5), nn.functional.dropout(q, 0.5)
        comparison(kept)  # what is saved after it
    with recompute.TakesCached(results):
        assert kernel(q, 0.0).data_ptr() == kept.data_ptr()
        torch.manual_seed(0)
        again = kernel(q, 0.5), nn.functional.dropout(q, 0.5)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_what_a_library_keeps_for_its_backward_is_not_compared():
    kept = Comparison("an LSTM", least_dim=0)
    workspaces = [torch.full((8,), value, dtype=torch.uint8) for value in (0, 7)]
    differs = kept(workspaces[0]) != kept(workspaces[1])
    assert not differs
    with pytest.raises(DifferentValuesError, match="an LSTM computes other values"):
        assert kept(torch.zeros(8)) != kept(torch.ones(8))


def _with_rrelu(mode: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.RReLU()) for _ in range(3)))
    engine = ts.parallelize(
        model, ts.Plan(recompute=mode), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.functional.mse_loss
    )
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    return [engine.step(x, x.flip(0)).item() for _ in range(4)]


def test_an_activation_that_draws_at_the_end_of_a_block(ranks):
    """torch's RReLU saves its noise before it draws it."""
    expected = ranks(1, _with_rrelu, "none")[0]
    assert len(set(expected)) == 4
    for mode in ("full", "selective"):
        assert ranks(1, _with_rrelu, mode)[0] == pytest.approx(expected, rel=1e-6)
