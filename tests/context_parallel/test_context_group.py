"""A group of real processes."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(31, 16), nn.ModuleList([Block(16) for _ in range(2)])

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        h = F.dropout(self.embedding(x), 0.2)
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


def test_processes_on_gloo(ranks):
    ranks(2, _train, None)


def test_recomputation_on_gloo(ranks):
    ranks(2, _train, False)
    ranks(2, _train, True)
