"""The ZeRO paper's table of model states, by runs of the Engine on fake tensors, beside the paper's formulas.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", table 1: the memory of
weights, gradients and Adam's states on a device, in mixed precision. It depends on the number of parameters, not on
their layers. So models of few and wide blocks stand for those of the paper.

tensorshard differs in three ways. A rank's shard of the gradients is in fp32 for the optimizer, 2 bytes more for each
parameter of the shard. With one micro-batch, a full gradient is freed as soon as it is reduced, at level 1 too. On one
device, where nothing is gathered, level 3 keeps 16-bit weights beside the masters, as the other levels do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.rank_estimate import CATEGORIES, GRADIENTS, OPTIMIZER, PARAMETERS

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
DEVICES = (1, 4, 16, 64, 256, 1024)
LEVELS = (1, 2, 3)
_BLOCKS, _HEADS = 4, 8
_STATES = [CATEGORIES.index(name) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)]


@dataclass(frozen=True)
class StatesCell:
    """One number of the table.

    Args:
        parameters: number of parameters of the model that was run.
        states: bytes of weights, gradients and optimizer states, when there are most of them.
    """

    size: str
    devices: int
    level: int
    parameters: int
    states: int

    @property
    def paper(self) -> float:
        """The paper's formula for as many parameters: 16-bit weights and gradients, 12 bytes of fp32 states."""
        full, shared = {1: (4, 12), 2: (2, 14), 3: (0, 16)}[self.level]
        return self.parameters * (full + shared / self.devices)

    @property
    def formula(self) -> float:
        """This package's formula: 16-bit weights where they are not gathered; shards of fp32 masters, gradients and
        Adam's two states."""
        gathers = self.level == 3 and self.devices > 1
        return self.parameters * ((0 if gathers else 2) + 16 / self.devices)

    @property
    def error(self) -> float:
        """The error of the run, relative to this package's formula."""
        return self.states / self.formula - 1

    @property
    def gigabytes(self) -> float:
        """The number for the model that the paper names, as in its table."""
        return self.states / self.parameters * SIZES[self.size] / 1e9


def states_cell(size: str, devices: int, level: int) -> StatesCell:
    """Runs a model of about `size` parameters under ZeRO `level`, as one of `devices` ranks."""
    width = round((SIZES[size] / (12 * _BLOCKS)) ** 0.5 / (8 * _HEADS)) * 8 * _HEADS
    tokens = torch.zeros(1, 8, dtype=torch.long)
    build = partial(GPT, vocab_size=8, context_length=8, num_layers=_BLOCKS, num_heads=_HEADS, width=width)
    estimate = ts.estimate(
        build,
        ts.Plan(zero=level, precision="bf16", reduce_dtype="bf16"),
        world_size=devices,
        inputs=tokens,
        targets=tokens,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        loss_fn=next_token_loss,
    )
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build().parameters())
    states = max(sum(moment.held[i] for i in _STATES) for moment in estimate.ranks[0].history)
    return StatesCell(size, devices, level, parameters, states)


def states_cells(sizes: Sequence[str] = tuple(SIZES), devices: Sequence[int] = DEVICES) -> list[StatesCell]:
    """Every number of the table."""
    return [states_cell(size, count, level) for size in sizes for count in devices for level in LEVELS]
