"""Parameters that a forward writes: from a rank's own samples they are refused, from sums they are one process's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import seeds
import tensorshard as ts
from engines import ADAMW, own_shard
from toys import data, squares

WIDTH = 16


class Statistics(nn.Module):
    """Writes a parameter in forward, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.summed: Any = None  # sums over the data ranks
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), requires_grad=False)
        self.done = False

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.cat([x.sum(0), x.new_tensor([float(len(x))])])
        sums = sums if self.summed is None else self.summed(sums)
        return sums[:-1] / sums[-1]

    @torch.no_grad()
    def write(self, x: torch.Tensor) -> None:
        mean = self.mean(x)
        if self.way == "first batch":
            if not self.done:
                self.scale.data.copy_(1 + mean.abs())
        elif self.way == "codebook":
            self.kept.lerp_(mean.expand(4, WIDTH), 0.1)
        elif self.way == "codebook data":
            self.kept.data[1].mul_(0.9).add_(mean, alpha=0.1)
        elif self.way == "bias":
            self.kept[0].add_((mean - mean.mean()).sign(), alpha=0.01)
        elif self.way == "queue":
            self.kept[:2] = mean
        elif self.way == "normalized":
            self.scale.div_(self.scale.norm() / 4)
        self.done = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.way != "parent":
            self.write(x)
        return x * self.scale + self.kept.sum(0)


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        seeds.seed(3)
        self.way = way
        self.inlet, self.outlet = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Statistics(way)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        if self.way == "parent" and self.training:
            with torch.no_grad():
                self.blocks[0][1].kept.mul_(0.9).add_(self.blocks[0][1].mean(x), alpha=0.1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(x)


def _run(way: str, fields: dict[str, Any], summed: bool, steps: int = 3) -> tuple[str, int, dict[str, torch.Tensor]]:
    sample = data(0)[0][:2]
    engine = ts.parallelize(
        lambda: Net(way), ts.Plan(**fields), optimizer=ADAMW, loss_fn=squares, sample_inputs=sample, timeout=30
    )
    if summed:
        group = engine.mesh.dp_group
        for module in engine.model.modules():
            if isinstance(module, Statistics):
                module.summed = lambda sums: ts.distributed.reduce(sums, group=group)
    initial = {name: value.clone() for name, value in engine.full_state_dict().items()}
    for step in range(steps):
        try:
            engine.step(*own_shard(engine, *data(step)))
        except RuntimeError as error:
            dist.barrier()
            return str(error), step, {}
    return "", steps, {"initial": initial, **engine.full_state_dict()}


def _alone(way: str, initial: dict[str, torch.Tensor], steps: int = 3) -> dict[str, torch.Tensor]:
    model = Net(way)
    model.load_state_dict(initial)
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        squares(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


WAYS = ["first batch", "codebook", "codebook data", "bias", "queue", "parent"]
PLANS = [
    (2, dict(zero=0)),
    (2, dict(zero=1)),
    (2, dict(zero=3)),
    (2, dict(zero=3, recompute="full")),
    (2, dict(zero=3, precision="bf16")),
    (4, dict(zero=3, dp_replicate=2)),
    (4, dict(zero=3, tp=2)),
    (4, dict(zero=1, tp=2)),
    (4, dict(zero=3, pp=2, micro_batches=2)),
    (4, dict(zero=1, pp=2, micro_batches=2)),
]


@pytest.mark.fast_cases(
    "4-{'zero': 3, 'tp': 2}-queue",
    "4-{'zero': 3, 'dp_replicate': 2}-queue",
    "2-{'zero': 3}-first batch",
    "2-{'zero': 1}-first batch",
    "2-{'zero': 0}-first batch",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world", "fields"), PLANS, ids=str)
def test_what_a_rank_takes_from_its_own_samples_is_refused(ranks, world, fields, way):
    if "pp" in fields and way == "first batch":
        way = "codebook"  # a parameter with a gradient that a forward writes is refused where the model is cut
    found = ranks(world, _run, way, fields, False)
    for message, step, _ in found:
        assert "different values of" in message
        assert "'blocks." in message
        assert "ts.distributed.reduce" in message
        assert step == 0


@pytest.mark.parametrize("way", [*WAYS, "normalized"])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(dict(zero=0), marks=pytest.mark.slow),
        pytest.param(dict(zero=1), marks=pytest.mark.slow),
        dict(zero=3),
    ],
    ids=str,
)
def test_sums_over_the_ranks_are_those_of_one_process(ranks, fields, way):
    [(message, _, state), _] = ranks(2, _run, way, fields, True)
    assert message == ""
    parity.assert_same_state(state, _alone(way, state.pop("initial")), 1e-5)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeds.seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _write_on_one_part(fields: dict[str, Any], same: bool) -> tuple[str, int, dict[str, torch.Tensor]]:
    engine = ts.parallelize(Pairs, ts.Plan(**fields), optimizer=ADAMW, loss_fn=squares, timeout=20)
    for step in range(3):
        if step == 1:
            with torch.no_grad():  # the row is in the shard of one tensor-parallel rank, or on one stage
                for name, parameter in engine.model.named_parameters():
                    if name == "blocks.0.0.weight":
                        parameter[0] += torch.full((6,), 1.0 if same else 1.0 + engine.mesh.dp_rank)
        try:
            engine.step(*own_shard(engine, *data(step)))
        except RuntimeError as error:
            return str(error), step, {}
    return "", 3, engine.full_state_dict()


@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=1, tp=2),
        dict(zero=3, tp=2),
        dict(zero=0, tp=2),
        dict(zero=3, tp=2, precision="bf16"),
        dict(pp=2, micro_batches=2),
    ],
    ids=str,
)
def test_ranks_raise_together_where_the_write_differs_on_a_part_of_the_model(ranks, fields):
    for message, step, _ in ranks(4, _write_on_one_part, fields, False):
        assert "different values of the parameter 'blocks.0.0.weight'" in message
        assert step == 1


@pytest.mark.parametrize("fields", [dict(zero=1, tp=2), dict(zero=3, tp=2), dict(pp=2, micro_batches=2)], ids=str)
def test_the_same_write_on_a_part_of_the_model_is_that_of_one_process(ranks, fields):
    [(message, _, state), *_] = ranks(4, _write_on_one_part, fields, True)
    assert message == ""
    model = Pairs()
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        if step == 1:
            with torch.no_grad():
                model.blocks[0][0].weight[0] += 1.0
        squares(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    parity.assert_same_state(state, model.state_dict(), 1e-5)
