"""Which blocks are alike, and so are verified once."""

import functools
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import table_models
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.verify.model_run import find_units, run_once

WIDTH = 8


class Mlp(nn.Module):
    """What it does between its layers is told by attributes."""

    def __init__(self, between: Callable[["Mlp", torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between = between
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self, self.up(x)))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain(block: Mlp, hidden: torch.Tensor) -> torch.Tensor:
    return F.relu(hidden)


def by_kind(block: Mlp, hidden: torch.Tensor) -> torch.Tensor:
    return {"relu": F.relu, "gelu": F.gelu, "softmax": functools.partial(F.softmax, dim=-1)}[block.kind](hidden)


def kinds(*blocks: nn.Module) -> list[int]:
    model = Stack(*blocks)
    run = run_once(model, list(find_units(model)), torch.zeros(2, 3, WIDTH))
    return list(run.kinds.values())


class Mode(Enum):
    LOCAL = 1
    GLOBAL = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("gelu", "relu"),
        (0.5, 2.0),
        (1, 1.0),
        (True, False),
        (None, 3),
        (Mode.LOCAL, Mode.GLOBAL),
        ((1, "a"), (1, "b")),
        ({"window": 4}, {"window": 8}),
        (SimpleNamespace(inner=SimpleNamespace(kind="a")), SimpleNamespace(inner=SimpleNamespace(kind="b"))),
        (F.gelu, F.relu),
        (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu, approximate="none")),
    ],
)
def test_blocks_that_differ_in_an_attribute_are_unlike(one, other):
    assert kinds(*(Mlp(plain, attribute=value) for value in (one, other, one))) == [0, 1, 0]


def test_equal_attributes_that_every_block_makes_anew_are_alike():
    def block() -> nn.Module:
        config = SimpleNamespace(heads=4, kinds=["a", "b"])
        config.itself = config
        return Mlp(plain, config=config, act=lambda x: x, table={"a": (1, 2)}, names={"a", "b"})

    assert kinds(block(), block(), block()) == [0, 0, 0]


def test_a_place_in_the_list_is_no_difference():
    def block(index: int) -> nn.Module:
        return Mlp(plain, layer_idx=index, number=index + 5, name=f"layer.{index}", rate=0.1 * index / 3)

    assert kinds(*map(block, range(4))) == [0] * 4


def test_numbers_that_are_no_places_are():
    assert kinds(*(Mlp(plain, heads=heads) for heads in (4, 4, 2))) == [0, 0, 1]
    assert kinds(*(Mlp(plain, heads=heads) for heads in (2, 4))) == [0, 1]


def test_blocks_that_compute_by_their_place_are_unlike():
    def every_other(block: Mlp, hidden: torch.Tensor) -> torch.Tensor:
        return F.relu(hidden) if block.layer_idx % 2 else F.gelu(hidden)

    def scaled(block: Mlp, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / (block.layer_idx + 1)

    assert kinds(*(Mlp(every_other, layer_idx=index) for index in range(4))) == [0, 1, 0, 1]
    assert kinds(*(Mlp(scaled, layer_idx=index) for index in range(3))) == [0, 1, 2]


def test_buffers_of_other_shapes_are_a_difference():
    blocks = [Mlp(plain) for _ in range(3)]
    for block, size in zip(blocks, (4, 4, 6), strict=True):
        block.register_buffer("table", torch.zeros(size))
    assert kinds(*blocks) == [0, 0, 1]


@pytest.mark.parametrize("kind", ["gpt", "llama", "gpt2", "phi3", "hf_bert", "bloom", "mixtral"])
def test_ordinary_blocks_are_alike(kind):
    model = table_models.make(kind)
    run = run_once(model, list(find_units(model)), table_models.inputs(kind))
    assert list(run.kinds.values()) == [0, 0]


def test_blocks_that_a_string_makes_unlike_are_split_each_by_its_own_check():
    model = Stack(*(Mlp(by_kind, kind=kind) for kind in ("relu", "softmax", "gelu", "softmax")))
    found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 3, WIDTH))
    split = {name.rpartition(".")[0] for name, style in found.plan.resolve(model).items() if style.name == "colwise"}
    assert split == {"layers.0", "layers.2"}


class Windowed(nn.Module):
    """Computes long sequences in windows."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.unflatten(1, (-1, self.window)).cumsum(2).flatten(1, 2) if x.shape[1] > self.window else x


@pytest.mark.parametrize(("window", "kept"), [(1024, [2, 12, 8]), (64, [4, 512, 8])])
def test_a_large_batch_is_cut_where_less_shows_the_same(window, kept):
    model = Windowed(window)
    run = run_once(model, list(find_units(model)), torch.zeros(4, 512, 8), 2)
    assert list(run.inputs.shape) == kept == list(run.calls["layers.0"].args[0].shape)
