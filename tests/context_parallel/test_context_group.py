"""A group of real processes."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorshard as ts
from tensorshard.context_parallel import ContextGroup, cut, whole, zigzag


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.conv(h.transpose(1, 2)).transpose(1, 2) * h.mean(1, keepdim=True)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding, self.blocks = nn.Embedding(31, 16), nn.ModuleList([Block(16) for _ in range(2)])

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        h = F.dropout(self.embedding(x), self.dropout)
        for block in self.blocks:
            h = block(h) if reentrant is None else checkpoint(block, h, use_reentrant=reentrant)
        return F.cross_entropy((h @ self.embedding.weight.T)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def _train(reentrant: bool | None) -> None:
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randint(0, 31, (2, 21))
    alone = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = alone(x)
    expected.backward()
    group = ContextGroup.of(dist.group.WORLD)
    torch.manual_seed(1)
    with group.active():
        loss = whole(model(cut(x, 1, zigzag(21, group.size)), reentrant))
    (loss / group.size).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(one.grad)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    assert not group.fallbacks and sum(group.received.values()) > 0


def _train_with_zero(zero: int, recompute: str) -> None:
    torch.manual_seed(0)
    model = Model(dropout=0.0)
    x = torch.randint(0, 31, (2, 21))
    alone, losses, group = copy.deepcopy(model), [], ContextGroup.of(dist.group.WORLD)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.02)
    engine = ts.parallelize(
        model,
        ts.Plan(zero=zero, recompute=recompute),
        optimizer=partial(torch.optim.SGD, lr=0.02),
        loss_fn=lambda out, _: out,
    )
    for _ in range(3):
        expected = alone(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        with group.active():
            loss = whole(engine.model(cut(x, 1)))
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append((loss.item(), expected.item()))
    assert losses[0][0] != losses[2][0]
    for loss, expected in losses:
        assert abs(loss - expected) < 1e-5 * abs(expected), losses
    assert all("uneven_means.py" in line for _, line in group.fallbacks), group.fallbacks  # which hashes a batch


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_that_are_sharded_over_the_same_ranks(ranks, zero, recompute):
    ranks(2, _train_with_zero, zero, recompute)


def test_processes_on_gloo(ranks):
    ranks(2, _train, None)


def test_recomputation_on_gloo(ranks):
    ranks(2, _train, False)
    ranks(2, _train, True)
