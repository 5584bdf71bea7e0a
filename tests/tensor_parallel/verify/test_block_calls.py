"""How a model calls its blocks, found on fake tensors: arguments, and where they come from."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tensorshard.model.batches import call_model
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.verify.block_calls import as_call, capture_calls


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if scale is None else x * scale


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: dict(zip(("x", "scale"), pair, strict=True))])
def test_a_model_is_run_on_what_the_engine_calls_it_with(kind):
    inputs = kind((torch.zeros(2, 8), torch.ones(8)))
    model = Stack(Mlp(), Mlp())
    assert call_model(model, inputs).shape == (2, 8)
    found = find_tensor_plan(model, 2, inputs=inputs)
    assert found.plan.to_dict() == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    call = as_call(inputs)
    assert len(call.args) + len(call.kwargs) == 2


class Peeking(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        first = self.layers[0](x)
        second = self.layers[1](first)
        return self.layers[2](second) + torch.zeros_like(first)


def test_where_arguments_come_from_and_what_other_code_reads():
    capture = capture_calls(Peeking(Mlp(), Mlp(), Mlp()), [f"layers.{i}" for i in range(3)], torch.zeros(2, 8))
    assert capture.calls["layers.0"].providers == {}
    assert capture.calls["layers.1"].providers == {0: ("layers.0", 0)}
    assert capture.calls["layers.2"].providers == {0: ("layers.1", 0)}
    # Who reads the shape alone must see the full one.
    assert capture.read_outside == {("layers.0", 0), ("layers.2", 0)}
    assert not capture.repeated


@dataclass
class Pair:
    main: torch.Tensor
    other: torch.Tensor


class OfPairs(Mlp):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        return Pair(super().forward(pair.main), pair.other)


class Pairs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        pair = Pair(x, x * 2)
        for layer in self.layers:
            pair = layer(pair)
        return pair.main + pair.other


def test_blocks_that_hand_on_dataclasses():
    model = Pairs(OfPairs(), OfPairs())
    capture = capture_calls(model, ["layers.0", "layers.1"], torch.zeros(2, 8))
    assert capture.calls["layers.1"].providers == {0: ("layers.0", 0), 1: ("layers.0", 1)}
    assert find_tensor_plan(model, 2, inputs=torch.zeros(2, 8)).plan.to_dict() == {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    }
