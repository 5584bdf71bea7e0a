"""The port for modules that do parts of a plan's work themselves, such as an update of their parameters in backward.

The core asks every :class:`TrainsItself` of a model what it asks here, and knows none of their classes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn


class OwnRule(Protocol):
    """The update that a module made in its own backward, and that a plan's optimizer makes in its place."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that it trains, in the model."""

    def check(self, model: nn.Module) -> None:
        """Refuses the rule if no optimizer could do exactly the same. Nothing is allocated.

        Raises:
            ValueError: none could.
        """

    def add_group(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """Adds a parameter group to `optimizer` that makes the update. Ranks without the parameters add an empty one.

        Raises:
            ValueError: an optimizer of this class cannot make it.
        """

    def log(self) -> None:
        """Logs how the update is made now."""


class TrainsItself:
    """What a plan asks of a module that may do parts of its work. By default the module does none.

    A base class and not a Protocol: no module of a user's can be one by accident.
    """

    methods_with_parameters: tuple[str, ...] = ()
    """Methods beside ``forward`` that read parameters. Hooks on modules do not see calls of them."""

    def check_under_plan(self, name: str, *, takes_rules: bool = True) -> None:
        """Refuses what the module does by itself and a plan does as well.

        Args:
            name: of the module in the model.
            takes_rules: whether the optimizer is still to be built, so that it can take over an :class:`OwnRule`.

        Raises:
            ValueError: there is something.
        """

    def own_rule(self, name: str, model: nn.Module) -> OwnRule | None:
        """The update that backward makes; None if it makes none. Nothing is changed.

        Args:
            name: of the module in `model`.
        """
        return None

    def leave_gradients(self) -> None:
        """Switches the update off: backward leaves gradients, in new parameters that share the old ones' memory."""

    def linear_sizes(self) -> tuple[int, int] | None:
        """Input and output features, if the module can compute with a part of its outputs; else None."""
        return None

    def split_outputs(self, group: torch.distributed.ProcessGroup) -> None:
        """Makes it compute with this rank's outputs. The caller puts this rank's rows into the parameters."""


def self_training(model: nn.Module) -> dict[str, TrainsItself]:
    """The modules of `model` that may do parts of a plan's work, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TrainsItself)}


def own_rules(model: nn.Module) -> list[OwnRule]:
    """The rules by which modules of `model` update their parameters in backward. The model is left as it is."""
    rules = [module.own_rule(name, model) for name, module in self_training(model).items()]
    return [rule for rule in rules if rule is not None]


def take_own_rules(model: nn.Module) -> list[OwnRule]:
    """As :func:`own_rules`, and switches these updates off."""
    rules = own_rules(model)
    for module in self_training(model).values():
        module.leave_gradients()
    return rules


def call_before_methods(model: nn.Module, action: Callable[[], None]) -> None:
    """Calls `action` before the methods of modules in `model` that read parameters and of which hooks see no calls."""
    for module in self_training(model).values():
        for method in module.methods_with_parameters:
            setattr(module, method, partial(_after, action, getattr(module, method)))


def _after(action: Callable[[], None], method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    action()
    return method(*args, **kwargs)
