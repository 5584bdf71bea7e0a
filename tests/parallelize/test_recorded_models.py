"""torch.compile trains a laid-out model exactly; what would record one rank's part of it says what to do instead."""

from typing import Any

import pytest
import torch
from torch import nn

from engines import engine_of, own_shard
from toys import data, squares


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
        self.outlet = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(x)


def _trained(compiled: str, fields: dict[str, Any]) -> list[float]:
    torch._dynamo.reset()
    engine = engine_of(_Net, **fields)
    model = engine.model
    if compiled == "whole":
        model = torch.compile(model, backend="aot_eager")
    elif compiled == "block":
        engine.model.blocks[0].compile(backend="aot_eager")
    losses = []
    for step in range(3):
        inputs, targets = own_shard(engine, *data(step))
        losses.append(engine.backward(squares(model(inputs), targets)).item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("zero", [2, 3])
def test_a_model_that_the_user_compiles_before_its_first_step(ranks, zero):
    plain, whole, block = (ranks(2, _trained, how, {"zero": zero})[0] for how in ("", "whole", "block"))
    assert whole == pytest.approx(plain, rel=1e-6) and block == pytest.approx(plain, rel=1e-6)
    assert len(set(plain)) == 3


def _refused(fields: dict[str, Any]) -> dict[str, str]:
    torch._dynamo.reset()
    engine = engine_of(_Net, **fields)
    inputs, targets = own_shard(engine, *data(0))
    ways = {
        "compile": lambda: torch.compile(engine.model, backend="eager")(inputs),
        "trace": lambda: torch.jit.trace(engine.model, (inputs,)),
        "export": lambda: torch.export.export(engine.model, (inputs,)),
        "script": lambda: torch.jit.script(engine.model),
    }
    said = {}
    for name, way in ways.items():
        try:
            way()
        except RuntimeError as error:
            said[name] = str(error)
    engine.step(inputs, targets)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"zero": 3}, {"tp": 2}], ids=str)
def test_what_would_record_a_part_is_refused(ranks, fields):
    said = ranks(2, _refused, fields)[0]
    for name in ("trace", "script") if "tp" in fields else ("trace", "export", "script"):
        assert f"torch.{'jit.' * (name != 'export')}{name}" in said[name] and "full_state_dict" in said[name]
    assert ("compile" in said) == ("tp" in fields)
    assert "tp" not in fields or "Plan(compile=True)" in said["compile"]
