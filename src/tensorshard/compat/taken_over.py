"""What a script brings: its Plan, its optimizer, made anew of the laid-out weights, and its schedulers.

The calls of :mod:`tensorshard.compat` share this. Scripts for other libraries build ``optimizer`` from
``model.parameters()``, and hand over both; :func:`tensorshard.parallelize` takes what makes an optimizer.
"""

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tensorshard.common.words import kind_of
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.optimizers import inner_schedulers

ENVIRONMENT = "TENSORSHARD_PLAN"
"""A variable that names a Plan's YAML file, for scripts that give none."""


def rebuilt(optimizer: torch.optim.Optimizer, model: nn.Module, call: str) -> OptimizerFactory:
    """What makes an optimizer like `optimizer`, with its groups and their options, of the laid-out weights of `model`.

    Args:
        call: who asks, for messages.

    Raises:
        TypeError: `optimizer` is none, or its class needs more than it keeps in its ``defaults``.
        ValueError: it has stepped, or holds parameters of another model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{call} was given {kind_of(optimizer)} as the optimizer; it must be a torch Optimizer")
    name = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(
            f"{call} was given a {name} that has stepped, whose states belong to the weights as they were: call it "
            f"before the first step, and load states from a checkpoint afterwards"
        )
    names = {id(p): n for n, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if id(p) not in names]
        if foreign:
            raise ValueError(
                f"{call} was given a {name} with a parameter of shape {list(foreign[0].shape)} that is not in the "
                f"{type(model).__name__}: build it from this model's parameters()"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append((options, [names[id(p)] for p in group["params"]]))
    accepted = inspect.signature(type(optimizer)).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if takes_all or key in accepted}
    missing = [
        key
        for key, p in list(accepted.items())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and key not in defaults
    ]
    if missing:
        raise TypeError(
            f"{call} was given a {name}, which cannot be made again of the laid-out weights: it does not keep its "
            f"{', '.join(missing)}; call tensorshard.parallelize(model, plan, optimizer=parameters -> {name}) instead"
        )

    def build(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        given = dict(named_parameters)
        held = [name for _, members in groups for name in members]
        # A stage of a pipeline without weights gets a stand-in, which is in no group.
        rest = list(given.values()) if not any(name in given for name in held) else []
        made = []
        for place, (options, members) in enumerate(groups):
            own = [given[name] for name in members if name in given]
            made.append({**options, "params": own + (rest if place == 0 else [])})
        return type(optimizer)(made, **defaults)

    return build


def follow_optimizer(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Lets a `scheduler` of torch that the script has built set the rates of the Engine's `optimizer`."""
    if isinstance(scheduler, LRScheduler) or hasattr(scheduler, "optimizer"):
        scheduler.optimizer = optimizer
    for inner in inner_schedulers(scheduler):
        follow_optimizer(inner, optimizer)


def given_plan(plan: Any) -> Plan:
    """The Plan that a script or its environment names; whole replicas if none does."""
    if plan is None and os.environ.get(ENVIRONMENT):
        plan = os.environ[ENVIRONMENT]
    if plan is None:
        return Plan(zero=0)
    if isinstance(plan, str | os.PathLike):
        return Plan.from_yaml(Path(plan))
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {kind_of(plan)}; it must be a tensorshard.Plan, or the path of its YAML file")
    return plan


def agreed(argument: str, asked: Any, field: str, planned: Any, default: Any) -> Any:
    """What an argument and the Plan say together; one of them may be at its default."""
    if asked != default and planned not in (default, asked):
        raise ValueError(f"{argument}={asked!r} was given with a plan of {field}={planned!r}: give one of the two")
    return planned if asked == default else asked
