"""A one-process stand-in for the Engine, for tests of what stands on top of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from whole_checkpoints import write_whole


class CountingEngine:
    """Trains a 2-to-1 linear layer in plain PyTorch and notes what it is asked to save."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.mesh = SimpleNamespace(rank=0, dp_rank=0, dp_size=1, dp_group=None)
        self.device = torch.device("cpu")
        self.step_count = 0
        self.grad_norm: float | None = None
        self.metrics: dict[str, Tensor] = {}
        self.saved: dict[str, dict[str, Any]] = {}

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.evaluate(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        return loss.detach()

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(inputs), targets)

    def save(self, path: Path, *, extra: dict[str, Any] | None = None, overwrite: bool = False) -> None:
        assert overwrite or not path.exists()
        write_whole(path)
        self.saved[path.name] = extra or {}


def regression_batches(count: int = 4, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The same `count` batches of ``(inputs, targets)`` at each call."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 2, generator=generator) for _ in range(count)]
    return [(x, x.sum(dim=1, keepdim=True)) for x in inputs]
