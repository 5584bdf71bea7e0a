"""Watches of parameters: their order, what they replace, copies, and pauses."""

import copy
from typing import Any

import torch
from torch import nn

from tensorshard.model.watched_parameters import Pause, Watch, unwatch, watch, watches_of


class Doubling(Watch):
    """Shows twice what is held."""

    stays_in_copies = True

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        return None if held is None else 2 * held

    def held_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else gradient / 2

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return "twice" if function is torch.Tensor.sum else NotImplemented


class Adding(Doubling):
    """Shows one more, and is asked last."""

    stays_in_copies = False
    is_outermost = True

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        return None if held is None else held + 1

    def held_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else gradient - 1


def test_the_outermost_watch_gets_what_the_others_show():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    outer, inner = Adding(), Doubling()
    watch(parameter, outer)
    watch(parameter, inner)
    assert watches_of(parameter) == [inner, outer]
    assert parameter.grad.tolist() == [7.0, 7.0]
    parameter.grad = torch.full((2,), 11.0)
    unwatch(parameter, inner)
    unwatch(parameter, outer)
    assert type(parameter) is nn.Parameter and parameter.grad.tolist() == [5.0, 5.0]


def test_a_watch_replaces_functions_and_stays_in_copies():
    parameter = nn.Parameter(torch.ones(2))
    watch(parameter, Doubling())
    watch(parameter, Adding())
    copied = copy.deepcopy(parameter)
    assert parameter.sum() == copied.sum() == "twice" and parameter.max() == 1
    assert [type(watching) for watching in watches_of(copied)] == [Doubling]


def test_a_pause_makes_parameters_plain():
    alone, watched_twice = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    watching, other = Doubling(), Watch()
    for parameter in (alone, watched_twice):
        watch(parameter, watching)
    watch(watched_twice, other)
    pause = Pause([alone, watched_twice])
    pause.begin()
    assert type(alone) is nn.Parameter and alone.sum() == 2
    assert type(watched_twice) is not nn.Parameter
    unwatch(watched_twice, other)
    pause.end()
    assert alone.sum() == watched_twice.sum() == "twice"
