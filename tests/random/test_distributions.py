"""What random operators return within same_randomness: their distributions, and that each is drawn by element."""

import math

import pytest
import torch
from torch import nn

import tensorshard as ts

N = 1 << 15

# id: (what draws [64, N / 64] values, their mean, their standard deviation)
DRAWS = {
    "bernoulli": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    "bernoulli of a tensor": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, math.sqrt(0.21)),
    "rand_like": (torch.rand_like, 0.5, math.sqrt(1 / 12)),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-2, 4), 1, 6 * math.sqrt(1 / 12)),
    "randn_like": (torch.randn_like, 0, 1),
    "normal": (lambda x: torch.normal(torch.ones_like(x), 2.0), 1, 2),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "log_normal": (lambda x: torch.empty_like(x).log_normal_(0, 0.5), math.exp(0.125), 0.6039),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.25), 4, math.sqrt(12)),
    "randint_like": (lambda x: torch.randint_like(x, 10), 4.5, math.sqrt(99 / 12)),
    "dropout": (lambda x: nn.functional.dropout(torch.ones_like(x), 0.2), 1, 0.5),
    "alpha_dropout": (lambda x: nn.functional.alpha_dropout(torch.ones_like(x), 0.2, training=True), None, None),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([[1.0, 2, 1]]).expand(64, 3), N // 64, True), 1, 0.7071),
    "gumbel": (lambda x: nn.functional.gumbel_softmax(torch.zeros(*x.shape, 2), hard=True)[..., 0], 0.5, 0.5),
    "rrelu": (
        lambda x: nn.functional.rrelu(-torch.ones_like(x), training=True),
        -(1 / 8 + 1 / 3) / 2,
        5 / 24 / 12**0.5,
    ),
}


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


@pytest.mark.parametrize("name", DRAWS)
def test_means_and_deviations(name):
    draw, mean, deviation = DRAWS[name]
    model, x = Drawing(draw), torch.zeros(64, N // 64)
    with ts.same_randomness(model, seed=4):
        drawn = model(x)
        other = model(x)
    assert not torch.equal(drawn, other)
    if mean is None:
        return
    drawn = drawn.double()
    assert abs(drawn.mean() - mean) < 4.5 * deviation / N**0.5
    assert abs(drawn.std() / deviation - 1) < 0.05


@pytest.mark.parametrize("name", [name for name in DRAWS if name != "multinomial"])
def test_samples_draw_the_same_alone(name):
    model, x = Drawing(DRAWS[name][0]), torch.zeros(64, N // 64)
    with ts.same_randomness(model, seed=4):
        whole = model(x)
    with ts.same_randomness(model, seed=4) as randomness:
        randomness.begin_samples(40, 24)
        randomness.note_inputs(x[40:])
        with randomness.forward():
            part = model.forward(x[40:])
    assert torch.equal(part, whole[40:])


def test_extremes():
    model = Drawing(lambda x: torch.stack([torch.empty_like(x).bernoulli_(p) for p in (0.0, 1.0)]))
    with ts.same_randomness(model):
        drawn = model(torch.zeros(64, 64))
    assert drawn[0].sum() == 0
    assert drawn[1].sum() == 64 * 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_stay_below_one(dtype):
    model = Drawing(torch.rand_like)
    with ts.same_randomness(model):
        drawn = model(torch.zeros(64, N // 64, dtype=dtype))
    assert drawn.dtype == dtype
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.double().mean() - 0.5) < 0.01
