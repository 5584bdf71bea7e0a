"""Backward of a gradient under tensor parallelism: gradient penalties, and forces inside of forward."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parity
import seeds
import tensorshard as ts

SGD = partial(torch.optim.SGD, lr=0.005)


class Attention(nn.Module):
    """Written out: the fused kernels for CPUs cannot be differentiated twice."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16) for _ in range(2)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Forces(nn.Module):
    """A learned potential, which returns an energy and its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Transformer()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum((1, 2))
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, slope


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv1d(5, 8, 1), nn.Tanh(), nn.Conv1d(8, 5, 1)) for _ in range(2)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Llama(nn.Module):
    """One head of keys and values, which two ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = parity.build("llama_one")
        self.llama.set_attn_implementation("eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.llama(inputs_embeds=x).logits


MODELS: dict[str, Any] = {
    "transformer": (Transformer, 16),
    "convolutions": (Convolutions, 6),
    "llama": (Llama, 32),
}


def build(kind: str) -> nn.Module:
    seeds.seed(3)
    return MODELS[kind][0]()


def batch(width: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, width, generator=torch.Generator().manual_seed(step))


def penalized(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.tanh().sum(), x, create_graph=True)
    return scores.mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


def distance(full: dict[str, torch.Tensor], alone: nn.Module) -> float:
    return max(((full[name] - value).abs().max().item() for name, value in alone.state_dict().items()), default=0.0)


def penalize(kind: str, fields: dict[str, Any]) -> float:
    model = build(kind)
    alone = copy.deepcopy(model)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=F.mse_loss)
    optimizer = SGD(alone.parameters())
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    for step in range(3):
        x = batch(MODELS[kind][1], step)
        penalized(alone, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(penalized(engine.model, x[share]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    full = engine.full_state_dict()
    return distance(full, alone) if full else 0.0


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("kind", MODELS)
def test_a_gradient_penalty(ranks, kind):
    assert ranks(2, penalize, kind, dict(tp=2))[0] < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("transformer", marks=pytest.mark.slow), "llama"])
def test_a_gradient_penalty_with_parts_of_the_sequence(ranks, kind):
    assert ranks(2, penalize, kind, dict(tp=2, sequence_parallel=True))[0] < 2e-5


@pytest.mark.slow
def test_a_gradient_penalty_with_data_ranks(ranks):
    assert ranks(4, penalize, "transformer", dict(tp=2, zero=1))[0] < 2e-5


def energies_and_forces(output: Any, targets: torch.Tensor) -> torch.Tensor:
    energy, slope = output
    return energy.tanh().mean() + (slope - targets).square().mean()


def follow_forces(fields: dict[str, Any]) -> float:
    seeds.seed(4)
    model = Forces()
    alone = copy.deepcopy(model)
    engine = ts.parallelize(
        model, ts.Plan(**fields), optimizer=SGD, loss_fn=energies_and_forces, sample_inputs=batch(16, 9)
    )
    optimizer = SGD(alone.parameters())
    for step in range(3):
        x, y = batch(16, step), batch(16, step + 10)
        energies_and_forces(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step(x, y)
    full = engine.full_state_dict()
    return distance(full, alone) if full else 0.0


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forces_inside_of_forward(ranks, sequence_parallel):
    assert ranks(2, follow_forces, dict(tp=2, sequence_parallel=sequence_parallel))[0] < 2e-5
