"""What is remembered of the shapes that a pipeline was given."""

import gc
import logging
from unittest import mock

import torch
from torch import nn

from tensorshard.pipeline.cut import cut_model
from tensorshard.pipeline.run import cut_cache
from tensorshard.pipeline.run.cut_cache import CutCache
from tensorshard.pipeline.trace.tracer import Tracer


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = x + scale * block(x)
        return x


def _shapes(model: nn.Module) -> CutCache:
    tracer = Tracer(model)
    return CutCache(tracer, cut_model(tracer.trace({"x": torch.zeros(2, 4), "scale": 0.5}), 2))


def test_the_same_shapes_are_examined_once():
    model = Scaled()
    shapes = _shapes(model)
    first = shapes.of({"x": torch.zeros(2, 4), "scale": 0.5}, model)
    assert shapes.of({"x": torch.ones(2, 4), "scale": 0.5}, model) is first
    assert shapes.of({"x": torch.ones(3, 4), "scale": 0.5}, model) is not first


def test_numbers_that_change_are_noticed_once_and_do_not_fill_memory(caplog):
    model = Scaled()
    shapes = _shapes(model)
    with caplog.at_level(logging.WARNING, "tensorshard"), mock.patch.object(cut_cache, "_MOST_KNOWN", 10):
        for step in range(30):
            shapes.of({"x": torch.zeros(2, 4), "scale": step / 30}, model)
    assert len(shapes._known) == 10
    assert caplog.text.count("differ in Python numbers alone") == 1
    assert "pass such a number as a tensor" in caplog.text


def test_many_shapes_are_no_numbers(caplog):
    model = Scaled()
    shapes = _shapes(model)
    with caplog.at_level(logging.WARNING, "tensorshard"):
        for size in range(1, 12):
            shapes.of({"x": torch.zeros(size, 4), "scale": 0.5}, model)
    assert caplog.text == ""


SHAPE = (47, 53)  # of no other test's tensors


class Norms(nn.Module):
    """Norms keep what they return for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(53, 53), nn.LayerNorm(53), nn.Sigmoid()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_nothing_of_a_run_is_left():
    model = Norms()
    tracer = Tracer(model)
    assert len(tracer.trace(torch.zeros(SHAPE)).calls) == 3
    gc.collect()
    left = [o for o in gc.get_objects() if type(o).__name__ in ("Tensor", "FakeTensor") and tuple(o.shape) == SHAPE]
    assert not left
