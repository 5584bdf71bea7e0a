"""A forward that reads a parameter out of sight, as it was before the plan, is refused by name before an update."""

import pytest
import torch
from torch import nn

from engines import ADAMW, engine_of, own_shard
from toys import data, squares

REGISTRY: dict[str, nn.Parameter] = {}


class Net(nn.Module):
    of_class: list[nn.Parameter] = []

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inlet, self.outlet = nn.Linear(6, 5), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.eye(5))
        REGISTRY["weight"] = self.weight
        Net.of_class[:] = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = REGISTRY["weight"] if self.way == "global" else self.of_class[0]
        return self.outlet(self.inlet(x) @ weight)


def _run(way: str, given: bool, fields: dict) -> tuple[str, bool]:
    model = Net(way) if given else lambda: Net(way)
    try:
        engine = engine_of(model, **fields)
        before = engine.full_state_dict()
        engine.step(*own_shard(engine, *data(0)))
    except (RuntimeError, ValueError) as error:
        after = engine.full_state_dict()
        return str(error), all(torch.equal(value, after[name]) for name, value in before.items())
    return "", False


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=3), dict(zero=2, precision="bf16")], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["module", "callable"])
@pytest.mark.parametrize("way", ["global", "class"])
def test_a_parameter_held_out_of_sight(ranks, way, given, fields):
    for message, unchanged in ranks(2, _run, way, given, fields):
        assert "a forward of a Net (" in message
        assert "test_replaced_parameters.py:" in message
        assert "reads parameter 'weight' as it was before parallelize" in message
        assert unchanged


def _reads_outside() -> float:
    model = Net("global")
    engine = engine_of(model, zero=1)
    engine_of(nn.Linear(6, 3), zero=1).step(*data(0))
    return float(REGISTRY["weight"].sum() + squares(torch.eye(5) @ REGISTRY["weight"], torch.eye(5))) + len(
        engine.full_state_dict()
    )


def test_other_code_may_read_it(ranks):
    assert ADAMW
    assert ranks(1, _reads_outside)[0] > 5
