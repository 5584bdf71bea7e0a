"""Models that call torch.distributed for all ranks, under plans whose ranks share samples: refused by name."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engines import engine_of, own_shard
from toys import data, squares

_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": dist.all_reduce,
    "all_gather": lambda x: dist.all_gather_into_tensor(x.new_empty(dist.get_world_size() * 16), x),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x.new_empty(16 // dist.get_world_size()), x),
    "all_to_all": lambda x: dist.all_to_all_single(x.new_empty(16), x),
    "broadcast": lambda x: dist.broadcast(x, 0),
}


class Summing(nn.Module):
    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls = calls
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total = x.sum(tuple(range(x.dim() - 1)))
            if self.calls:
                _CALLS[self.calls](total)
            self.total.lerp_(total, 0.1)
        return x - self.total


class Net(nn.Module):
    def __init__(self, calls: str) -> None:
        super().__init__()
        self.inlet, self.blocks = nn.Linear(6, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.summing, self.outlet = Summing(calls), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(self.summing(x))


def _run(fields: dict[str, Any], calls: str, own_loop: bool = False) -> str:
    engine = engine_of(Net(calls), **fields)
    x, y = own_shard(engine, *data(0))
    try:
        if own_loop:
            engine.backward(squares(engine.model(x), y))
        else:
            engine.step(x, y)
    except RuntimeError as error:
        return str(error)
    return ""


TP = dict(tp=2, tp_plan={"blocks.0": "colwise_gather"})


@pytest.mark.fast_cases("reduce_scatter-False", "allreduce-False")
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("calls", _CALLS)
def test_a_call_for_all_ranks_under_tp_is_refused(ranks, calls, own_loop):
    for message in ranks(2, _run, TP, calls, own_loop):
        found = re.search(
            r"the model calls torch.distributed itself \((\w+), test_own_collectives.py:\d+\), for all", message
        )
        assert found and found[1].startswith(calls), message
        assert "group=engine.mesh.dp_group" in message


def test_others_are_not(ranks):
    assert ranks(2, _run, TP, "") == ["", ""]
    assert ranks(2, _run, dict(zero=1), "allreduce") == ["", ""]
