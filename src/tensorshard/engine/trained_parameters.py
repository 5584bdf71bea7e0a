"""Which parameters an Engine's optimizer trains, as user code freezes, unfreezes and adds some."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from tensorshard.engine.optimizer import OptimizerFactory, build_optimizer
from tensorshard.model.trains_itself import OwnRule
from tensorshard.sharded.sharded_model import ShardedModel


class TrainedParameters:
    """Keeps an optimizer's parameter groups in step with what user code does to ``requires_grad``.

    A parameter that is frozen later stays in its group: it has no gradient, and optimizers skip it. One that is trained
    only later joins the group that the optimizer's factory puts it in.

    Args:
        factory: made `optimizer`.
        rules: of parameters that are trained in groups of their own.
        reserved: whether the optimizer's states are offloaded, for which there is room since the start alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factory: OptimizerFactory,
        rules: Sequence[OwnRule],
        sharded: ShardedModel,
        *,
        reserved: bool,
    ) -> None:
        self._optimizer = optimizer
        self._factory = factory
        self._rules = rules
        self._sharded = sharded
        self._reserved = reserved
        self._known = set(sharded.trained_masters())
        self._groups = len(optimizer.param_groups)
        optimizer.add_param_group = MethodType(  # type: ignore[method-assign]
            self._adding(optimizer.add_param_group), optimizer
        )

    def check(self) -> None:
        """Called before gradients are made.

        Raises:
            RuntimeError: a parameter that was frozen is trained now, and the optimizer's states are offloaded.
        """
        if self._reserved:
            self._refuse_offloaded(self._sharded.trained_masters().keys() - self._known)

    def _refuse_offloaded(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            raise RuntimeError(
                f"parameter {name!r} was frozen when parallelize laid out the optimizer's states, which are offloaded, "
                f"and is trained now: leave requires_grad=True at parallelize for all that will be trained, and freeze "
                f"after it, or take a plan without offload of the optimizer"
            )

    def follow(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Adds those of `trained`, the masters that are trained now, that the optimizer does not hold yet."""
        if trained.keys() <= self._known:
            return
        new = {name: master for name, master in trained.items() if name not in self._known}
        self._known.update(new)
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        new = {name: master for name, master in new.items() if master not in held}
        if not new:
            return
        everything = {name: m for name, m in self._sharded.masters().items() if name in self._known}
        model = build_optimizer(self._factory, everything, self._rules)
        for index, group in enumerate(model.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                if not any(parameter is master for master in new.values()):
                    continue
                if index >= self._groups:  # the factory makes more groups than before
                    self._optimizer.param_groups.append(
                        {**group, "params": [], **({"param_names": []} if names else {})}
                    )
                    self._groups += 1
                target = self._optimizer.param_groups[index]
                target["params"].append(parameter)
                if names:
                    target["param_names"].append(names[place])
                if parameter in model.state:  # some optimizers make states when they are built
                    self._optimizer.state[parameter] = model.state[parameter]

    def _adding(self, add: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        """``add_param_group``, which takes parameters of the model and adds their masters."""

        def add_param_group(_: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            shown = self._sharded.shown_parameters()
            names = {id(p): name for name, p in shown.items()}
            masters = self._sharded.masters()
            given = param_group["params"]
            members = [given] if isinstance(given, torch.Tensor) else list(given)
            replaced = []
            for member in members:
                name, parameter = member if isinstance(member, tuple) else (None, member)
                full_name = names.get(id(parameter))
                if full_name is not None:
                    if self._reserved:
                        self._refuse_offloaded([full_name])
                    self._known.add(full_name)
                    parameter = masters[full_name]
                replaced.append(parameter if name is None else (name, parameter))
            add({**param_group, "params": replaced})

        return add_param_group


def methods_beside_step(optimizer: torch.optim.Optimizer) -> list[str]:
    """The public methods that the class of `optimizer` adds to those of torch's optimizers, such as ``eval``."""
    return [
        name
        for name in dir(type(optimizer))
        if not name.startswith("_")
        and not hasattr(torch.optim.Optimizer, name)
        and callable(getattr(type(optimizer), name))
    ]
