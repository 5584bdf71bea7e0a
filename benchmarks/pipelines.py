"""The work that pipelined contenders share: equal blocks in an ``nn.Sequential``, and its batches, in fp32."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensorshard.models.layers import MLP

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
"""Every contender's optimizer."""

_SEED = 0


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over this micro-batch."""
    return F.mse_loss(output, targets)


@dataclass(frozen=True)
class PipelineWork:
    """Equal blocks, cut into equal stages.

    Args:
        name: of the work.
        blocks: how many; a multiple of the stages.
        width: features of a token.
        tokens: of a micro-batch, each a sample of its own.
        micro_batches: of a step.
        sleep_seconds: what a block's forward takes, the gradient of its input and that of its parameters each, in
            blocks that do not compute but sleep, so that more ranks than cores do not get into each other's way; 0 for
            blocks that compute.
    """

    name: str
    blocks: int
    width: int
    tokens: int
    micro_batches: int
    sleep_seconds: float = 0.0

    def module(self) -> nn.Sequential:
        """The model, ``[tokens, width]`` to the same, with the same initial weights everywhere."""
        torch.manual_seed(_SEED)
        if self.sleep_seconds:
            return nn.Sequential(*(SleepingBlock(self.width, self.sleep_seconds) for _ in range(self.blocks)))
        return nn.Sequential(*(Block(self.width) for _ in range(self.blocks)))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(_SEED + 1 + step)
        shape = (self.micro_batches * self.tokens, self.width)
        inputs, targets = (torch.randn(shape, generator=generator) for _ in range(2))
        return inputs, targets

    def ideal_seconds(self, ranks: int) -> float:
        """How long a rank's own sleeping takes in one step."""
        return 3 * self.sleep_seconds * self.blocks / ranks * self.micro_batches


class Block(nn.Module):
    """A normalized MLP and its residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class SleepingBlock(nn.Module):
    """Scales its input, and takes its time for it."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        # Apart, for schedules that compute the two gradients apart; the first block takes as long with one of them.
        for_scale = self.seconds if x.requires_grad else 2 * self.seconds
        return _SleepBackward.apply(x, self.seconds) * _SleepBackward.apply(self.scale, for_scale)


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None
