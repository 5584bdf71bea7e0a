"""Small models with the oddities that real ones have, and the plain loop that they are compared with."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import seeds

WIDE = 128  # a square weight of this width travels by itself at ZeRO 0 to 2; smaller ones are packed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3)  # three rows, unevenly cut over two or four ranks
        self.down = nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Frozen, unused, tied, scalar and tiny parameters; some used by batches with a positive first entry alone."""

    def __init__(self) -> None:
        super().__init__()
        seeds.seed(2)
        self.inlet = nn.Linear(6, WIDE)
        self.frozen = nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.wide = nn.Linear(WIDE, WIDE)
        self.narrow = nn.Linear(WIDE, 5)
        self.blocks = nn.ModuleList([Block(5), Block(5)])
        self.blocks[1].norm.weight = self.blocks[0].norm.weight
        self.shift = nn.Parameter(torch.randn(3))
        self.logit_scale = nn.Parameter(torch.tensor(0.3))
        self.sometimes = nn.Linear(6, 5)
        self.sometimes_wide = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE)
        self.never = nn.Linear(4, 4)
        self.never_wide = nn.Parameter(torch.randn(WIDE, WIDE))
        self.register_buffer("mean", torch.full((5,), 0.1))
        self.register_buffer("mask", torch.tensor([True, False, True, True, True]), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, sometimes=bool(x[0, 0] > 0))

    def compute(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        h = torch.relu(self.frozen(self.inlet(x)))
        if sometimes:
            h = h + h @ self.sometimes_wide
        y = self.narrow(torch.tanh(self.wide(h)))
        if sometimes:
            y = y + self.sometimes(x)
        for block in self.blocks:
            y = block(y)
        self.calls += 1
        y = (y - self.mean) * self.mask
        return (y[:, :3] + self.shift) * self.logit_scale.exp()


class Regular(Odd):
    """The same, but every batch uses the same parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, sometimes=True)


def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return (output - targets).square().mean()


def data(step: int, size: int = 8, *, sometimes: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for Odd; the first `sometimes` samples have a positive first entry, the others a negative one."""
    generator = seeds.generator(step)
    inputs, targets = torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)
    if sometimes is not None:
        inputs[:, 0] = torch.where(torch.arange(size) < sometimes, 1.0, -1.0)
    return inputs, targets


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[tuple[Any, Any]]],
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] = squares,
    clip: float | None = None,
) -> Iterator[float]:
    """Losses of one step for each of `batches`, whose parts count by their samples."""
    for parts in batches:
        samples = sum(len(targets) for _, targets in parts)
        total = 0.0
        for inputs, targets in parts:
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            loss = loss_fn(output, targets) * (len(targets) / samples)
            loss.backward()
            total += loss.item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        yield total
