"""Searches where most plans do not fit: bounds of memory, what estimates teach, and that a plan that fits is found."""

from importlib import import_module
from typing import Any

import pytest
import torch
from tests.predict.search.test_find_plans import Layer, asked, find
from torch import nn

import tensorshard as ts
from tensorshard.pipeline.run.draw_schedule import timeline
from tensorshard.predict.search.predictions import _kept
from tensorshard.predict.search.problem import make_problem
from tensorshard.predict.search.search import BY_MEMORY, BY_TIME, Search


class Model(nn.Module):
    """Large activations, and a last layer that has nearly all of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(64) for _ in range(4))
        self.last = nn.Linear(64, 40000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x[:, 0])


ARGUMENTS: dict[str, Any] = {
    "world_size": 4,
    "inputs": torch.zeros(32, 256, 64),
    "targets": torch.zeros(32, dtype=torch.long),
    "global_batch": 32,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=3),
        dict(zero=3, recompute="full"),
        dict(zero=1, micro_batches=4),
        dict(pp=4, zero=0, micro_batches=4),
        dict(pp=2, zero=3, micro_batches=8),
        dict(pp=2, zero=2, pp_schedule="interleaved_1f1b", pp_stages_per_rank=2, micro_batches=8, recompute="full"),
        dict(tp=2, zero=3),
    ],
)
def test_predicted_memory_is_a_bound_that_knows_the_largest_parameter(fields):
    fixed = ts.Plan(**fields).resolve(4).to_dict()
    done = Search(make_problem(Model, **asked(**ARGUMENTS, memory="1GiB", fixed=fixed))).run(BY_TIME, 1)
    (one,) = done.considered
    assert one.estimate is not None
    assert 0.35 < one.first.memory / one.estimate.largest.peak_device <= 1


class Frozen(nn.Module):
    """Many frozen layers in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(48))
        self.layers = nn.ModuleList(layers).requires_grad_(False)
        self.last = nn.Linear(1024, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_weights_count_in_their_own_type(precision):
    fixed = ts.Plan(zero=3, precision=precision).resolve(4).to_dict()
    batch = {"inputs": torch.zeros(4, 1024), "targets": torch.zeros(4, dtype=torch.long), "global_batch": 4}
    problem = make_problem(Frozen, **asked(**batch, world_size=4, memory="1GiB", fixed=fixed))
    (one,) = Search(problem).run(BY_TIME, 1).considered
    assert one.estimate is not None
    assert 0.35 < one.first.memory / one.estimate.largest.peak_device <= 1


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("gpipe", 1)])
def test_the_part_of_activations_that_a_rank_keeps(schedule, stages):
    for ranks, micro_batches in ((2, 4), (4, 4), (16, 32), (4, 6), (16, 24)):
        played = timeline(schedule, ranks=ranks, stages_per_rank=stages, micro_batches=micro_batches)
        most = max(played.kept(rank) for rank in range(ranks)) / (ranks * stages)
        kept = max(_kept(schedule, stages, ranks, micro_batches / ranks))
        assert kept == most if ranks <= 8 else 0.95 * most <= kept <= most


@pytest.mark.slow
def test_a_plan_that_fits_is_found_where_the_fastest_do_not(monkeypatch):
    fixed = {"tp": 1, "pp": 1, "offload": None}
    problem = make_problem(Model, **asked(**ARGUMENTS, memory="1GiB", fixed=fixed))
    least = Search(problem).run(BY_MEMORY, 1).fitting[0].memory
    monkeypatch.setattr(
        import_module("tensorshard.predict.search.find_plans"), "_TRIES", 2
    )  # so that those with the least memory are soon tried
    found = find(Model, **ARGUMENTS, fixed=fixed, memory=least, top=1)
    assert found.best.memory == least
    with pytest.raises(ValueError, match="no plan of 4 ranks fits") as error:
        find(Model, **ARGUMENTS, fixed=fixed, memory=least - 1)
    assert " -" not in str(error.value)  # as in "by at least -8 MiB"
