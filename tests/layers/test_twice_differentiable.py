"""Layers and losses that are split over ranks, differentiated twice, against torch's own on one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.nn.functional import parallel_cross_entropy, parallel_embedding

OPTIONS = {
    "plain": {},
    "smoothed": dict(label_smoothing=0.1),
    "sums": dict(reduction="sum"),
    "z_loss": dict(z_loss=0.1),
    "capped": dict(softcap=3.0),
}


def slopes_of_cross_entropy(options: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of a gradient's norm, from split logits and from full ones."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 4), torch.randn(9, 4)
    targets = torch.tensor([0, 8, -100, 3, 5, 1])
    start, rows = (0, 5) if dist.get_rank() == 0 else (5, 4)
    found = []
    for split in (True, False):
        given = x.clone().requires_grad_()
        if split:
            own = weight[start : start + rows].clone().requires_grad_()
            features = ts.distributed.copy(given, dist.group.WORLD)
            logits = ts.register_parallel_dim(features @ own.t(), -1, size=9)
        else:
            own = weight.clone().requires_grad_()
            logits = given @ own.t()
        (slope,) = torch.autograd.grad(
            parallel_cross_entropy(logits, targets, group=dist.group.WORLD if split else None, **options),
            given,
            create_graph=True,
        )
        slope.square().sum().backward()
        gradient = own.grad if split else own.grad[start : start + rows]
        found.append([slope.detach(), given.grad, gradient])
    return found[0], found[1]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_split_cross_entropy(ranks, options):
    for found, expected in ranks(2, slopes_of_cross_entropy, OPTIONS[options]):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def slopes_of_embedding() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    table, factor = torch.randn(7, 3), torch.randn(5, 3)
    indices = torch.tensor([0, 6, 2, 2, 4])
    start, rows = (0, 4) if dist.get_rank() == 0 else (4, 3)
    given = factor.clone().requires_grad_()
    own = table[start : start + rows].clone().requires_grad_()
    looked_up = parallel_embedding(indices, own, num_embeddings=7, dim=0, group=dist.group.WORLD)
    (slope,) = torch.autograd.grad((looked_up * given).sum(), own, create_graph=True)
    whole = ts.distributed.gather(slope, 0, dist.group.WORLD, size=7)
    whole.pow(3).sum().backward()
    alone, full = factor.clone().requires_grad_(), table.clone().requires_grad_()
    (slope,) = torch.autograd.grad((F.embedding(indices, full) * alone).sum(), full, create_graph=True)
    slope.pow(3).sum().backward()
    return given.grad, alone.grad


def test_a_split_embedding(ranks):
    for found, expected in ranks(2, slopes_of_embedding):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_loss_over_tiles_says_that_it_cannot_be_differentiated_twice():
    head = ts.nn.ParallelLinearCrossEntropy(4, 9)
    x = torch.randn(6, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(head(x, torch.arange(6)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="logits='whole'"):
        slope.square().sum().backward()
