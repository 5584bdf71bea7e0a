"""Methods and forwards may have arguments of any name: what is put around them takes its own by position."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from engines import engine_of


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def encode(
        self, context: torch.Tensor, method: int, is_wanted: bool, forward: int = 0, module: int = 0, action: int = 0
    ) -> torch.Tensor:
        for block in self.blocks:
            context = block(context)
        return context

    def forward(self, name: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(context=name, method=1, is_wanted=True))


def _called(fields: dict[str, Any]) -> float:
    engine: ts.Engine = engine_of(Named(), **fields)
    h = engine.model.encode(context=torch.ones(2, 8), method=2, is_wanted=False, forward=1, module=2, action=3)
    engine.backward(engine.model.head(h).square().mean())
    engine.optimizer.step()
    return engine.model(name=torch.ones(2, 8)).sum().item()


@pytest.mark.slow_cases("{'zero': 0}", "{'cp': 2}")
@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=3), dict(tp=2), dict(cp=2)], ids=str)
def test_methods_with_arguments_of_our_names(ranks, fields):
    assert ranks(2, _called, fields)[0] == pytest.approx(ranks(1, _called, dict(zero=0))[0], rel=1e-5)


def test_what_surrounds_methods_takes_its_own_arguments_by_position():
    """Each function of the rooms around a model that passes ``*args, **kwargs`` on to code of the user's."""
    found = []
    for room in ("model", "tensor_parallel/apply", "pipeline/run", "expert_parallel", "parallelize"):
        for path in sorted((Path(ts.__file__).parent / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.args.vararg and node.args.kwarg:
                    own = [argument.arg for argument in node.args.args]
                    passes_on = {"method", "forward", "function", "register", "sentence", "message"}
                    if passes_on.intersection(own):
                        found.append(f"{path.name}: {node.name}({', '.join(own)})")
    assert not found
