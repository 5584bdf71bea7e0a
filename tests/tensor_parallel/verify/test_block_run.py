"""Blocks whose code does something else in training: what it needs whole, the search leaves whole."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seeds
from tensorshard.tensor_parallel.search.check_table import WrongTableError, check_tensor_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.styles import COLWISE, ROWWISE
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.block_calls import capture_calls

WIDTH = 16


class Watching(nn.Module):
    """An MLP that looks at its hidden features in training, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.drop = nn.Dropout(0.5)
        self.kept = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.way == "clamped":
                with torch.no_grad():
                    self.up.weight.clamp_(-0.1, 0.1)
            elif self.way == "normed":
                with torch.no_grad():
                    self.up.weight.div_(self.up.weight.norm())
        h = torch.relu(self._up(x))
        if self.training:
            if self.way == "sizes":
                self.kept.lerp_(h.detach().flatten(0, -2).mean(0), 0.1)
            elif self.way == "number":
                self.largest.copy_(h.detach().mean())
            elif self.way == "output":
                x = x + h.mean(-1, keepdim=True)
            elif self.way == "drawn sizes":
                h = h + torch.rand(WIDTH)
            elif self.way == "drawn":
                x = x + torch.rand(())
            elif self.way == "drawn by python":
                x = x * random.random()
            elif self.way == "whole":
                self.table.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
            elif self.way == "dropout":
                h = nn.functional.dropout(h, 0.3, training=True)
        return x + self.down(self.drop(h))

    def _up(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.up.weight, self.up.bias
        if self.way == "noisy weight":
            return F.linear(x, weight + 0.1 * torch.randn_like(weight), bias) if self.training else self.up(x)
        return F.linear(x, weight, bias) if self.way == "read" and self.training else self.up(x)


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        seeds.seed(1)
        self.blocks = nn.ModuleList(Watching(way) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _inputs() -> torch.Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", ["sizes", "number", "output", "drawn sizes", "read", "noisy weight", "normed"])
def test_layers_whose_output_is_needed_whole_in_training_stay_whole(way):
    table = TensorTable({"blocks.*.up": COLWISE, "blocks.*.down": ROWWISE})
    with pytest.raises(WrongTableError, match="in training, "):
        check_tensor_table(Net(way), table, 2, inputs=_inputs())
    try:
        found = find_tensor_plan(Net(way), 2, inputs=_inputs())
    except ValueError as error:
        assert "in training" in str(error)
    else:
        assert not {"colwise", "rowwise"} & set(found.plan.to_dict().values())


@pytest.mark.parametrize("way", ["none", "drawn", "drawn by python", "whole", "dropout", "clamped"])
def test_what_needs_no_split_output_in_training_does_not_matter(way):
    found = find_tensor_plan(Net(way), 2, inputs=_inputs()).plan.to_dict()
    assert found["blocks.*.up"] == "colwise"
    assert found["blocks.*.down"] == "rowwise"


def test_dropout_and_batch_norms_are_no_other_code():
    norms = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    for model, inputs in ((Net("dropout"), _inputs()), (norms, torch.randn(4, 8)), (encoder, _inputs())):
        capture = capture_calls(model, [], inputs)
        assert not capture.training.differs
    capture = capture_calls(Net("sizes"), ["blocks.0"], _inputs())
    assert capture.training.differs
    assert capture.trained_otherwise == {"", "blocks.0"}
    assert capture.training.written == {"blocks.0.kept", "blocks.1.kept"}
