"""Where models are cut, what a run of them shows, and what cannot be cut."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import tensorshard as ts
from pipeline_models import EXAMPLES, Mixer
from tensorshard.models import GPT
from tensorshard.pipeline.cut import Cut, balanced_positions, cut_model
from tensorshard.pipeline.run.split_backward import backward_of_inputs
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.pipeline.trace.tracer import Tracer


def graph_of(model: nn.Module, inputs: Any) -> CallGraph:
    return Tracer(model).trace(inputs)


@pytest.fixture(scope="module")
def bert() -> CallGraph:
    return graph_of(*EXAMPLES["bert"].make())


def test_calls_and_needs():
    graph = graph_of(*EXAMPLES["gpt"].make())
    assert [call.unit for call in graph.calls] == [
        "embedding", "positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head",
    ]  # fmt: skip
    assert graph.calls[2].reads.leaves == {(0, 0), (1, 0)}
    assert graph.crossing(3) == ((2, 0),)
    assert graph.spec((6, 0)).shape == (2, 8, 61)
    # Twelve matrix products of 32 x 32 for 16 tokens, and attention: 2 heads of 16, 8 x 8.
    assert graph.calls[2].flops == 2 * 16 * 12 * 32 * 32 + 2 * 2 * (2 * 2 * 8 * 8 * 16)
    assert graph.calls[2].saved_bytes > 16 * 32 * 4


def test_repeated_calls_of_one_unit_are_calls_each():
    graph = graph_of(*EXAMPLES["mixer"].make())
    assert [call.unit for call in graph.calls].count("mix") == 3
    assert cut_model(graph, 3).shared.keys() == {"mix.weight", "mix.bias"}


def test_the_head_and_the_embedding_count():
    """A vocabulary that costs as much as blocks do leaves its stages fewer of these."""
    with torch.device("meta"):
        model = GPT(50_000, 64, 12, 4, 256)
    cut = cut_model(graph_of(model, torch.zeros(1, 64, dtype=torch.long)), 4)
    blocks = [
        sum(cut.graph.calls[i].unit.startswith("blocks") for i in range(start, stop)) for start, stop in cut.spans
    ]
    assert sum(blocks) == 12
    assert blocks[-1] < min(blocks[1:-1]) and blocks[0] <= min(blocks[1:-1])


class _TiledHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = ts.nn.ParallelLinearCrossEntropy(8, 40_000)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features, targets)


def test_a_head_of_many_tiles_counts_in_full_though_few_are_traced():
    inputs = (torch.zeros(64, 8), torch.zeros(64, dtype=torch.long))
    short = graph_of(_TiledHead(), inputs)
    with mock.patch("tensorshard.pipeline.trace.tracer.sample_loops", lambda _: nullcontext()):
        whole = graph_of(_TiledHead(), inputs)
    assert short.calls[-1].flops > 50 * short.calls[0].flops
    for one, other in zip(short.calls, whole.calls, strict=True):
        assert (one.unit, one.flops, one.saved_bytes) == (other.unit, other.flops, other.saved_bytes)
        assert one.written_bytes == pytest.approx(other.written_bytes, rel=1e-3)
    assert (short.output, short.calls[-1].reads) == (whole.output, whole.calls[-1].reads)


def test_equal_blocks_are_spread_evenly():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)])
    cut = cut_model(graph_of(model, torch.zeros(2, 8)), 4)
    assert cut.positions == (3, 6, 9)
    text = cut.describe()
    assert len(text.splitlines()) == 4 and "25.0% of the time" in text and "sends float32 [2, 8]" in text


@pytest.mark.parametrize("seed", range(5))
def test_balance_is_the_best(seed):
    from itertools import combinations

    generator = torch.Generator().manual_seed(seed)
    costs = torch.rand(9, generator=generator).tolist()

    def largest(cuts: Any) -> float:
        return max(sum(costs[a:b]) for a, b in zip([0, *cuts], [*cuts, len(costs)], strict=True))

    found = balanced_positions(costs, 4, range(1, 9), lambda position: 1)
    assert largest(found) <= 1.02 * min(largest(cuts) for cuts in combinations(range(1, 9), 3)) + 1e-9


def test_of_equal_cuts_the_one_that_sends_less_is_taken():
    assert balanced_positions([1.0, 0.0, 1.0], 2, [1, 2], lambda position: {1: 100, 2: 5}[position]) == [2]


def test_named_cuts(bert):
    assert cut_model(bert, 3, split=["blocks.1", "head"]).positions == tuple(
        next(i for i, call in enumerate(bert.calls) if call.unit.startswith(name)) for name in ("blocks.1", "head")
    )


@pytest.mark.parametrize(
    ("stages", "split", "message"),
    [
        (20, None, "has 1[0-9] units .* cannot make 20 stages"),
        (0, None, "it must be at least 1"),
        (3, ["blocks.1"], "names 1 modules .* makes 2 stages; 3 are needed: name 2"),
        (2, ["blokcs.1"], "did you mean 'blocks.1'"),
        (2, ["blocks.1.attention"], "is inside of 'blocks.1'.* name 'blocks.1'"),
        (2, ["embeddings"], "the first stage starts with anyway"),
        (3, ["blocks.2", "blocks.1"], "'blocks.1' after 'blocks.2', but it is called before it"),
        (3, ["blocks.1", "blocks.1"], "names .blocks.1. 2 times; each name starts one stage"),
    ],
)
def test_cuts_that_cannot_be(bert, stages, split, message):
    with pytest.raises(ValueError, match=message):
        cut_model(bert, stages, split=split)


def test_a_cut_sends_few_tensors(monkeypatch):
    graph = graph_of(*EXAMPLES["unet"].make())
    monkeypatch.setattr("tensorshard.pipeline.cut._MOST_CROSSING", 2)
    with pytest.raises(ValueError, match=r"before 'up\.0' would send 3 tensors.*at most 2.*before 'down\.1'"):
        cut_model(graph, 2, split=["up.0"])
    monkeypatch.setattr("tensorshard.pipeline.cut._MOST_CROSSING", 1)
    assert cut_model(graph, 2).positions in ((1,), (5,))


class Residual(nn.Module):
    """Adds up what its layers return, outside of any block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(40)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_sums_outside_of_blocks_are_cut_only_while_they_are_short():
    graph = graph_of(Residual(), torch.zeros(2, 4))
    assert cut_model(graph, 2).positions[0] <= 16
    with pytest.raises(ValueError, match=r"would send 20 tensors, outputs of .* at most 16 may cross"):
        cut_model(graph, 2, split=["layers.20"])
    with pytest.raises(ValueError, match="can be cut at 16 of its 39 places"):
        cut_model(graph, 18)


class SharedNorm(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.BatchNorm1d(12)


def test_running_statistics_are_not_shared_by_stages():
    x = torch.randn(4, 6)
    graph = graph_of(SharedNorm(), x)
    with pytest.raises(ValueError, match="'mix' is called on both sides and changes its buffers"):
        cut_model(graph, 2, split=["blocks.1"])
    positions = cut_model(graph, 2).positions[0]
    assert positions == 1 or positions > max(i for i, call in enumerate(graph.calls) if call.unit == "mix")


class Dropped(Mixer):
    """A mask that code outside of modules draws, and that the first block and the last use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(12), 0.5)
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            x = block(x * mask if index in (0, 2) else x)
        return self.head(x)


def test_random_numbers_are_not_drawn_twice():
    graph = graph_of(Dropped(), torch.randn(4, 6))
    with pytest.raises(ValueError, match="same random numbers"):
        cut_model(graph, 2, split=["blocks.1"])
    cut_model(graph, 2, split=["blocks.0"])


class Handing(nn.Module):
    """A block leaves a tensor where the next one finds it."""

    def __init__(self, board: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.board = board
        self.linear = nn.Linear(6, 6)
        self.also = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + self.board.get("note", 0)
        self.board["note"] = torch.tanh(self.also(x))
        return x


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.board: dict[str, torch.Tensor] = {}
        self.layers = nn.ModuleList([Handing(self.board), Handing(self.board), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.board.clear()
        for layer in self.layers:
            x = layer(x)
        return x


def test_tensors_handed_on_the_sly_keep_modules_together():
    graph = graph_of(Notes(), torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"'layers\.0' hands 'layers\.1' a tensor by another way"):
        cut_model(graph, 2, split=["layers.1"])
    assert cut_model(graph, 2).positions == (2,)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


def test_decisions_by_what_units_compute_are_refused():
    with pytest.raises(ValueError, match=r"decides by the value of a tensor.*after the call of 'layers\.0'"):
        graph_of(Deciding(), torch.zeros(2, 6))


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.layers[1](x)


def test_buffers_changed_outside_of_units_are_refused():
    with pytest.raises(ValueError, match="buffer 'mean' is changed by code outside"):
        graph_of(Averaging(), torch.zeros(2, 6))


class Noise(nn.Module):
    """Has no parameters, and draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape)


def test_modules_that_draw_become_units():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Noise()), nn.Linear(6, 6))
    assert [call.unit for call in graph_of(model, torch.zeros(2, 6)).calls] == ["0", "1.0", "2"]


def test_the_model_is_left_as_it_was():
    model, inputs = EXAMPLES["unet"].make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    graph = graph_of(model, inputs)
    assert isinstance(Cut(graph, (2,)).describe(), str)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_run_inside_of_a_fake_mode_is_the_same():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, inputs = EXAMPLES["gpt"].make()
    expected = graph_of(model, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2, 8, dtype=torch.long)
        found = graph_of(model, fake)
    assert [(call.unit, call.reads) for call in found.calls] == [(call.unit, call.reads) for call in expected.calls]
    assert found.output == expected.output


class Scaled(torch.autograd.Function):
    """Has an input and a parameter behind it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Branches(nn.Module):
    """A weight used twice, a parameter that no input reaches, and outputs that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.between = nn.Linear(6, 6)
        self.free = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(self.shared(x))
        z = Scaled.apply(self.shared(torch.tanh(self.between(y))), self.scale) + self.free
        return z.t(), y.view(-1), torch.exp(self.free)


def test_a_backward_in_two_parts_is_one():
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(3, 6, requires_grad=True)
    gradients = [torch.randn_like(output) for output in model(x)]
    torch.autograd.backward(model(x), gradients)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected_input, x.grad = x.grad, None
    model.zero_grad()
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    roots = [get_gradient_edge(output) for output in model(x)]
    (found,), weights = backward_of_inputs(roots, gradients, [x], model.parameters())
    torch.testing.assert_close(found, expected_input)
    assert not fired and all(p.grad is None for p in model.parameters())
    weights.run()
    assert sorted(fired) == sorted(expected)  # once each
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)
