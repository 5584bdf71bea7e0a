"""Estimates in which blocks that repeat are run once say what those say that run every call."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.composed_blocks import ComposedBlocks

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
TOKENS = torch.zeros(4, 12, dtype=torch.long)
IMAGES = torch.zeros(4, 3, 8, 8)
watched_steps = import_module("tensorshard.predict.watched_steps")


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.norms[0](self.first(x)))
        return self.activation(self.norms[1](self.second(y)) + x)  # type: ignore[no-any-return]


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*[_Residual() for _ in range(3)])
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class _Numbered(nn.Module):
    """Every second one does more; each keeps what it was called with last, if it is told to."""

    def __init__(self, number: int, keeps: bool) -> None:
        super().__init__()
        self.number, self.keeps = number, keeps
        self.layer = nn.Linear(8, 8)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            self.last = x.detach().clone()
        if self.number % 2:
            x = x.sin().cos()
        return x + self.layer(x)  # type: ignore[no-any-return]


class _Alternating(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Numbered(number, keeps) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Biased(nn.Module):
    """Hands a bias on, whose gradient comes from a transposed use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.bias(bias).flatten().view(8, 8)
        return x + self.layer(x @ bias.t()).relu(), bias


class _HandedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Biased() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = x[:1].expand(8, 8)
        for block in self.blocks:
            x, bias = block(x, bias)
        return x @ bias.t().contiguous()


_Case = tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], Any, Any, int, dict[str, Any]]
_GPT = (partial(GPT, 32, 12, 3, 2, 16), next_token_loss, TOKENS, TOKENS)
_RESNET = (_Images, F.cross_entropy, IMAGES, torch.zeros(4, dtype=torch.long))
CASES: dict[str, _Case] = {
    "ZeRO 0": (*_GPT, 1, dict(zero=0)),
    "ZeRO 2, bf16, recomputation": (*_GPT, 2, dict(zero=2, precision="bf16", recompute="full", micro_batches=2)),
    "selective recomputation": (*_GPT, 2, dict(zero=1, recompute="selective")),
    "ZeRO 3": (*_GPT, 2, dict(zero=3, recompute="full", micro_batches=2)),
    "pipeline": (*_GPT, 2, dict(pp=2, micro_batches=4)),
    "tp": (*_GPT, 2, dict(tp=2)),
    "tp, sequences in parts": (*_GPT, 2, dict(tp=2, sequence_parallel=True)),
    "a schedule with backwards in halves, which recomputation leaves whole": (
        *_GPT, 2, dict(pp=2, pp_schedule="zbv", pp_stages_per_rank=2, micro_batches=4, recompute="full"),
    ),
    "states and gradients on disk, in many tiles": (
        partial(GPT, 32, 12, 3, 2, 128), next_token_loss, TOKENS, TOKENS, 2,
        dict(zero=2, precision="bf16", offload={"optimizer": "disk", "gradients": "disk", "buffer_memory": "512KiB"}),
    ),
    "batch norms": (*_RESNET, 2, dict(zero=1, micro_batches=2)),
    "batch norms, ZeRO 3": (*_RESNET, 2, dict(zero=3)),
    "gradients that are not dense": (
        _HandedOn, F.mse_loss, torch.zeros(4, 8), torch.zeros(4, 8), 1, dict(zero=0, micro_batches=2),
    ),
    "gradients that are not dense, in a pipeline": (
        _HandedOn, F.mse_loss, torch.zeros(4, 8), torch.zeros(4, 8), 2, dict(pp=2, micro_batches=4),
    ),
    "blocks that differ by a number": (
        partial(_Alternating, False), F.mse_loss, torch.zeros(4, 8), torch.zeros(4, 8), 1, dict(zero=0),
    ),
    "blocks that keep a tensor": (
        partial(_Alternating, True), F.mse_loss, torch.zeros(4, 8), torch.zeros(4, 8), 1, dict(zero=0),
    ),
}  # fmt: skip


def _both(name: str) -> tuple[ts.Estimate, ts.Estimate, int, int]:
    """The estimate with every call run, and that in which they are told; and how many were run and told there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    model, loss, inputs, targets, world, fields = CASES[name]
    made: list[ComposedBlocks] = []

    def note(*arguments: Any) -> ComposedBlocks:
        made.append(ComposedBlocks(*arguments))
        return made[-1]

    def estimated() -> ts.Estimate:
        return ts.estimate(
            model, ts.Plan(**fields), world_size=world, inputs=inputs, targets=targets, optimizer=ADAMW, loss_fn=loss
        )

    with mock.patch.object(watched_steps, "_can_compose", lambda plan: False):
        run = estimated()
    with mock.patch.object(watched_steps, "ComposedBlocks", note):
        told = estimated()
    return run, told, sum(blocks.run for blocks in made), sum(blocks.told for blocks in made)


@pytest.mark.parametrize("name", CASES)
def test_estimates_agree(ranks, name):
    run, told, calls_run, calls_told = ranks(1, _both, name)[0]
    for one, other in zip(run.ranks, told.ranks, strict=True):
        assert other.peak_allocated == pytest.approx(one.peak_allocated, abs=64)
        assert other.peak_reserved == one.peak_reserved
        assert other.phase == one.phase
        for category, nbytes in one.by_category.items():
            assert abs(other.by_category[category] - nbytes) <= 0.005 * one.peak_allocated, category
        assert other.flops == one.flops
        assert other.operations.transfers == one.operations.transfers
        assert other.memory_traffic == one.memory_traffic
        assert (other.host_traffic, other.disk_traffic) == (one.host_traffic, one.disk_traffic)
    if name == "blocks that keep a tensor":
        assert calls_told == 0
    else:
        assert calls_told > calls_run
    if name == "blocks that differ by a number":
        assert calls_run == 4  # its number is read, so that each is one of a kind
