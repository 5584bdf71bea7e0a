"""The TorchShard article's model, data and training loop."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import seeds
import tensorshard as ts
from bounds import assert_within

CLASSES = 7

STEPS = 5

SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3}


class ArticleNet(nn.Module):
    """A backbone and a last layer; `parallel` is how the article changes its forward."""

    def __init__(self, parallel: bool, classes: int = CLASSES) -> None:
        super().__init__()
        self.parallel = parallel
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x).relu().mean((2, 3)))
        if self.parallel:
            x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


def article_samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeds.generator(step)
    return torch.randn(count, 3, 5, 5, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def article_optimizer(parameters, zero: bool, **settings) -> torch.optim.Optimizer:
    """As the article's script makes it."""
    if zero:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, **settings)
    return torch.optim.SGD(parameters, **settings)


def converted_net(dim: int | None) -> nn.Module:
    seeds.seed(0)
    model = ArticleNet(parallel=True)
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=dim)
    return model


def train_article(model, optimizer, scaler, start: int, stop: int, *, clip: float | None = None) -> list[float]:
    """The article's loop: model, gathered targets, loss, scaler."""
    criterion = ts.nn.ParallelCrossEntropyLoss()
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(start, stop):
        images, targets = article_samples(step, 3 * world)
        images, target = images[3 * rank : 3 * rank + 3], targets[3 * rank : 3 * rank + 3]
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            output = model(images)
            target = ts.distributed.gather(target, dim=0)
            loss = criterion(output, target)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert_within(error, tolerance, name)
