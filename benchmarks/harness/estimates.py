"""Cells of the benchmark of estimates. Each is a model under a plan, with what was estimated and measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import tensorshard as ts
from benchmarks.models.case import Batch, Case
from benchmarks.models.registry import find_cases

SAMPLES = 16  # of the global batch
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)

MODELS = {
    "GPT": "plain/minGPT",
    "BERT": "transformers/BERT",
    "ResNet": "plain/ResNet",
    "Llama": "transformers/Llama",
    "ViT": "transformers/ViT",
    "T5": "transformers/T5",
    "U-Net": "plain/U-Net",
    "mixture of experts": "transformers/Mixtral",
}
"""Small models, by kind."""

_PLANS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, dict(zero=0)),
    (1, dict(zero=0, recompute="full", micro_batches=2)),
    (2, dict(zero=1, precision="bf16")),
    (2, dict(zero=2, micro_batches=2)),
    (2, dict(zero=3, clip_grad_norm=1.0)),
    (2, dict(tp=2, zero=0)),
    (2, dict(pp=2, micro_batches=4, zero=0)),
    (4, dict(tp=2, pp=2, micro_batches=2, zero=0)),
    (4, dict(zero=3, recompute="full")),
    (4, dict(dp_replicate=2, dp_shard=2, zero=1)),
)
_NOT_RESNET = ("ResNet", "U-Net")  # convolutions; another benchmark covers their two-way splits


@dataclass(frozen=True)
class Cell:
    """One model under one plan."""

    model: str
    world_size: int
    fields: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name in the table."""
        words = [f"{name}={value}" for name, value in self.fields.items()]
        return f"{self.model}, {self.world_size} rank{'s' * (self.world_size > 1)}, {' '.join(words)}"

    def plan(self) -> ts.Plan:
        return ts.Plan(**self.fields)


@dataclass
class Measured:
    """What the ledger of a real run shows for a rank. The CPU time is the rank's own, of the second step."""

    rank: int
    stage: int
    peak: int
    by_category: dict[str, int]
    phase: str
    cpu_seconds: float


@dataclass
class Outcome:
    """The results of a cell. Sizes are in bytes, of the ranks that are the first of their stages.

    Args:
        estimated, measured: by rank.
        others: estimates of other tools for the rank with the most memory, by the tools' names.
        failure: why there is nothing to compare: which of the two runs failed, and its error.
    """

    name: str
    estimated: dict[int, int] = field(default_factory=dict)
    measured: dict[int, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        """The relative error of the rank with the largest one: (estimated - measured) / measured."""
        return max((self.estimated[r] / m - 1 for r, m in self.measured.items()), key=abs)


def all_cells() -> list[Cell]:
    """Every cell, in the order of world sizes."""
    cells = [
        Cell(model, world, fields)
        for model in MODELS
        for world, fields in _PLANS
        if not (model in _NOT_RESNET and {"tp", "pp"} <= set(fields))
    ]
    return sorted(cells, key=lambda cell: cell.world_size)


def case_of(cell: Cell) -> Case:
    return find_cases()[MODELS[cell.model]]


def build(case: Case) -> nn.Module:
    """The model, in training, with the same weights every time."""
    torch.manual_seed(1)
    return case.build().train()


def batch_of(case: Case, cell: Cell) -> Batch:
    """One data rank's batch; only its shapes matter."""
    fields = cell.fields
    data_ranks = cell.world_size // (fields.get("tp", 1) * fields.get("pp", 1))
    return case.batch(SAMPLES // data_ranks, torch.Generator().manual_seed(1000))


def estimate_cell(cell: Cell) -> ts.Estimate:
    """The estimate of a cell, in this process."""
    case = case_of(cell)
    inputs, targets = batch_of(case, cell)
    return ts.estimate(
        partial(build, case),
        cell.plan(),
        world_size=cell.world_size,
        inputs=inputs,
        targets=targets,
        optimizer=OPTIMIZER,
        loss_fn=case.loss,
        device="cpu",
    )


def summary_of(errors: Sequence[float]) -> Mapping[str, float]:
    """The median and the largest error, and how far an estimate is below the measured value at most."""
    distances = [abs(error) for error in errors]
    return {"median": median(distances), "worst": max(distances), "under": max(0.0, -min(errors))}
