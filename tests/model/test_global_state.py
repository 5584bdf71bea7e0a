"""What a model's memoized functions keep from runs that are not the user's."""

from functools import cache, lru_cache, wraps
from typing import Any

import pytest
import torch
from torch import nn

from tensorshard.model.global_state import restored_globals
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan


@lru_cache
def places(length: int) -> torch.Tensor:
    return torch.arange(length)


def _wrapped(function: Any) -> Any:
    remembered = cache(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return remembered(*args)

    return call


class Positions(nn.Module):
    """Makes positions by a function of the file, a static method that is wrapped, and one of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.own = lru_cache(torch.ones)

    @staticmethod
    @_wrapped
    def ramp(length: int) -> torch.Tensor:
        return torch.linspace(0, 1, length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = places(x.size(1)) + self.ramp(x.size(1)) + self.own(x.size(1))
        return x + self.down(torch.relu(self.up(x + offset[:, None])))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Positions() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_search_leaves_nothing_fake_in_them():
    model = Model()
    sample = torch.randn(2, 5, 8)
    expected = model(sample)
    for remembered in (places, *(block.own for block in model.blocks)):
        remembered.cache_clear()
    assert find_tensor_plan(model, 2, inputs=sample).split_share > 0.8
    for x in (sample, torch.randn(2, 7, 8)):
        assert type(model(x)) is torch.Tensor
    torch.testing.assert_close(model(sample), expected)


@pytest.mark.parametrize("known", [False, True])
def test_what_was_remembered_before_stays_if_nothing_new_was(known):
    model = Model()
    places.cache_clear()
    places(3)
    with restored_globals(model):
        places(3 if known else 4)
    assert places.cache_info().currsize == int(known)
