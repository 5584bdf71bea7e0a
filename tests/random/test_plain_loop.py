"""ts.same_randomness: a plain loop's numbers depend on the seed, the step and the place, and nothing else changes."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorshard as ts
from tensorshard.random.trial_runs import HostDraws, TrialModel


def _model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.3, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


X = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0))


def _train(model: nn.Module, seed: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with ts.same_randomness(model, seed):
        for _ in range(3):
            loss = model(X).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_the_seed_decides():
    torch.manual_seed(1)
    first = _train(_model(), 3)
    torch.manual_seed(2)
    assert _train(_model(), 3) == first
    assert _train(_model(), 4) != first


def test_each_step_and_each_forward_draws_anew():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ts.same_randomness(model):
        outputs = [model(X), model(X)]
        optimizer.step()
        outputs += [model(X), model(X)]
    assert len({output[0, 0, 0].item() for output in outputs}) == 4


def test_the_model_is_as_it_was():
    model = _model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    _train(model, 0)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.manual_seed(0)
    expected = nn.functional.dropout(torch.ones(50))
    torch.manual_seed(0)
    assert torch.equal(nn.functional.dropout(torch.ones(50)), expected)


def test_other_lengths_and_batches_are_drawn():
    model = _model()
    with ts.same_randomness(model):
        for samples, length in ((6, 5), (1, 5), (4, 9), (6, 1)):
            assert model(torch.randn(samples, length, 16)).shape == (samples, length, 16)


class Shared(nn.Module):
    """One block, called three times, recomputed if asked for."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Dropout(0.1))

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return x


@pytest.mark.parametrize("seed", [0, 1])
def test_recomputed_calls_draw_the_same(seed):
    assert _train(Shared(True), seed) == _train(Shared(False), seed)


class Branching(nn.Module):
    """A layer that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2)) for _ in range(4))
        self.stem = nn.Linear(16, 16)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            if torch.rand(()) > 0.5:
                x = x + layer(x)
        return x


def test_layers_may_be_left_out():
    first = _train(Branching(), 5)
    torch.manual_seed(9)
    model = Branching()
    assert len(set(first)) == 3
    with ts.same_randomness(model, 5):
        assert model(X).shape == X.shape


class Refused(nn.Module):
    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.draw(x) * self.weight


REFUSED = {
    "operator": (lambda x: torch.poisson(torch.ones_like(x)), "poisson"),
    "size": (lambda x: torch.rand(x.shape[0] + 1, 3).sum(), "follows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_the_same_is_refused(case):
    draw, word = REFUSED[case]
    model = Refused(draw)
    with ts.same_randomness(model), pytest.raises(RuntimeError, match=rf"{word}.*same_randomness"):
        model(X)
    assert torch.isfinite(draw(X)).all()  # and is torch's own outside


def test_a_generator_of_ones_own_is_ones_own():
    generator = torch.Generator()
    model = Refused(lambda x: torch.rand(x.shape, generator=generator))
    with ts.same_randomness(model):
        drawn = model(X)
    assert torch.equal(drawn, torch.rand(X.shape, generator=torch.Generator().manual_seed(generator.initial_seed())))


class DrawsOnHost(nn.Module):
    """Leaves a layer out, or noise for each sample, by Python's or numpy's numbers."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of == "batch" and self.training and random.random() < 0.5:
            return x
        if self.of == "samples" and self.training:
            x = x + torch.from_numpy(np.random.rand(len(x), 1)).float()
        return self.layer(x)


@pytest.mark.parametrize(
    ("of", "found"),
    [("none", HostDraws.NONE), ("batch", HostDraws.OF_BATCH), ("samples", HostDraws.OF_SAMPLES)],
)
def test_what_is_drawn_from_the_hosts_generators(of, found):
    model = DrawsOnHost(of)
    assert TrialModel(model).sites(torch.ones(4, 4), {}).host_draws is found
    random.seed(1)
    np.random.seed(1)
    x = torch.zeros(4, 4)
    with torch.no_grad(), ts.same_randomness(model, seed=5) as numbers:
        whole = model(x)
        parts = []
        for first in (0, 2):
            numbers.at(first)
            parts.append(model(x[:2]))
    assert torch.equal(torch.cat(parts), whole) == (of != "samples")  # micro-batches leave the same layers out
    assert random.random() == random.Random(1).random()
    assert np.random.rand() == np.random.RandomState(1).rand()


class Hooked(nn.Module):
    """Its first forward registers a hook, as transformers' models do that return what their layers returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.seen = nn.Linear(4, 4), nn.Dropout(0.5), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "is_hooked", False):
            self.inner.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.is_hooked = True
        self.seen.clear()
        self.inner(x)
        [output] = self.seen
        return self.drop(output)


def test_a_trial_run_takes_back_the_hooks_that_a_forward_registers():
    model = Hooked()
    with ts.same_randomness(model, 0):
        assert (model(torch.ones(6, 4)) == 0).any()
    assert len(model.inner._forward_hooks) == 1
