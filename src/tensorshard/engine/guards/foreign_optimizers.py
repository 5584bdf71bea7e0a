"""Optimizers that the user built on a model's parameters, beside the one that parallelize made.

One on the parameters of a sharded model trains them: before its step, the Engine completes and clips the gradients.
One on parameters that the model had before would train nothing. It is refused.

Also here: a guard that notices modules and parameters that user code registers in a model after a plan has laid it out.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensorshard.engine.combined_optimizer import members_of
from tensorshard.torch_private.modules import registrations

logger = logging.getLogger("tensorshard")

_PARAMETER = "_tensorshard_trained_by"
_OPTIMIZER = "_tensorshard_engine"
_HOLDER = "_tensorshard_held_by"
_STEPPED = "_tensorshard_stepped"
_REPLACED, _LAID_OUT = "nobody", "engine.optimizer"


def mark_replaced(parameters: Iterable[nn.Parameter]) -> None:
    """Notes that `parameters` are no longer those of their model, which a plan has laid out."""
    _watch_optimizers()
    for parameter in parameters:
        vars(parameter)[_PARAMETER] = _REPLACED


BeforeStep = Callable[[str], None]


class _Engines:
    """The mark of a parameter that an Engine's model shows. Copies of the parameter are of no Engine.

    Args:
        before_step: a method, called before another optimizer's step.
    """

    def __init__(self, before_step: BeforeStep | None) -> None:
        self._method = None if before_step is None else weakref.WeakMethod(before_step)

    @property
    def before_step(self) -> BeforeStep | None:
        return None if self._method is None else self._method()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Engines":
        return _Engines(None)


def mark_trained(
    masters: Iterable[nn.Parameter],
    shown: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    before_step: BeforeStep,
) -> None:
    """Notes that `optimizer`, an Engine's, trains a model.

    Args:
        masters: the parameters that it updates.
        shown: those that the model shows, which user code may give to another optimizer.
        before_step: a method, called with the class's name of such an optimizer before each of its steps.
    """
    _watch_optimizers()
    members = members_of(optimizer)
    for one in (optimizer, *members):
        vars(one)[_OPTIMIZER] = True
    for member in members:
        for inner in _held_by(member):
            vars(inner)[_HOLDER] = type(member).__name__
    for parameter in masters:
        vars(parameter)[_PARAMETER] = _LAID_OUT
    mark = _Engines(before_step)
    for parameter in shown:
        vars(parameter)[_PARAMETER] = mark


def mark_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Notes that `optimizer` calls an Engine's: schedulers that are built on it set the Engine's rates."""
    vars(optimizer)[_OPTIMIZER] = True


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called before every step of any optimizer.

    Raises:
        RuntimeError: it is not an Engine's, and holds parameters of a model that a plan has laid out.
    """
    mark = _trained_by(optimizer)
    if isinstance(mark, _Engines):
        before_step = mark.before_step
        if before_step is not None and _HOLDER not in vars(optimizer):
            before_step(type(optimizer).__name__)
            vars(optimizer)[_STEPPED] = True
            return
        mark = _LAID_OUT if before_step is not None else None
    if mark is None:
        return
    holder = vars(optimizer).get(_HOLDER)
    if holder is not None and mark == _LAID_OUT:
        name = type(optimizer).__name__
        raise RuntimeError(
            f"the {holder} that parallelize(optimizer=...) made updates through the {name} that it holds. Only the "
            f"optimizer that was returned can update under a plan: checkpoints and offload see its states alone, and "
            f"clipping and precision surround its step(). Return the {name} itself, and do what the {holder} adds in "
            f"the loop, around engine.optimizer.step(); or return one class of Optimizer whose step() does both"
        )
    raise RuntimeError(_sentence(type(optimizer).__name__, mark))


def _held_by(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers among the attributes of `optimizer`, or in lists and dicts there, and those that they hold."""
    held: list[torch.optim.Optimizer] = []
    todo = [optimizer]
    while todo:
        for value in vars(todo.pop()).values():
            members = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            inner = [
                v for v in members if isinstance(v, torch.optim.Optimizer) and v is not optimizer and v not in held
            ]
            held += inner
            todo += inner
    return held


def warn_of_schedulers() -> None:
    """Warns of learning-rate schedulers whose optimizer trains nothing.

    Such an optimizer was built on the parameters of a model that a plan has laid out. If it never steps, no error tells
    the user. torch has no hook for making or stepping a scheduler. So this looks for them among all objects, once per
    Engine.
    """
    classes: set[type] = {LRScheduler}
    waiting: list[type] = [LRScheduler]
    while waiting:
        found: set[type] = set(waiting.pop().__subclasses__()) - classes
        classes |= found
        waiting += found
    objects = gc.get_objects()  # so many that a loop in Python would be felt
    for candidate in compress(objects, map(classes.__contains__, map(type, objects))):
        if not hasattr(candidate, "optimizer"):
            continue
        mark = _trained_by(candidate.optimizer)
        if isinstance(mark, _Engines) and (mark.before_step is None or _STEPPED in vars(candidate.optimizer)):
            continue
        if mark is not None:
            logger.warning(
                "a %s sets the learning rates of an %s that does not train the model: build it on engine.optimizer",
                type(candidate).__name__,
                type(candidate.optimizer).__name__,
            )


def _trained_by(optimizer: torch.optim.Optimizer) -> str | _Engines | None:
    """What became of the parameters of `optimizer` in an Engine: `_REPLACED`, `_LAID_OUT`, or what is called before its
    step. None if no Engine has them, or `optimizer` is an Engine's."""
    if _OPTIMIZER in vars(optimizer):
        return None
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    marks = (vars(parameter).get(_PARAMETER) for parameter in parameters)
    return next((mark for mark in marks if mark is not None), None)


def _sentence(name: str, mark: str) -> str:
    remedy = (
        "give parallelize(optimizer=functools.partial(...)), call engine.optimizer.step(), and build learning-rate "
        "schedulers on engine.optimizer"
    )
    if mark == _REPLACED:
        return (
            f"this {name} was built on the parameters that the model had before tensorshard.parallelize laid it out. "
            f"The model has others now, so it trains nothing: {remedy}"
        )
    return (
        f"this {name} was built on the parameters of engine.optimizer, which updates them together with what the ranks "
        f"compute with: {remedy}; or build another optimizer on engine.model.parameters()"
    )


class ModuleChanges:
    """Compares a model's modules and parameters with those that were laid out.

    Args:
        model: laid out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_modules()]
        self._tables = registrations(model.modules())
        self._entries = [list(table.items()) for table in self._tables]
        self._values = [value for entries in self._entries for _, value in entries]

    def check(self) -> None:
        """Called before each step.

        Raises:
            RuntimeError: a module or a parameter was added, replaced or removed. It names the first.
        """
        values = list(chain.from_iterable(table.values() for table in self._tables))
        if len(values) == len(self._values) and all(map(is_, values, self._values)):
            return
        for index, (table, entries) in enumerate(zip(self._tables, self._entries, strict=True)):
            before, now = dict(entries), table
            for key in [*now, *before]:
                if now.get(key) is before.get(key) and (key in now) == (key in before):
                    continue
                owner = self._names[index // 2]
                what = "parameter" if isinstance(now.get(key, before.get(key)), nn.Parameter) else "module"
                how = "removed from" if key not in now else "added to" if key not in before else "replaced in"
                raise RuntimeError(
                    f"{what} {f'{owner}.{key}' if owner else key!r} was {how} the model after parallelize had laid it "
                    f"out, so that no plan applies to it and no optimizer trains it: change the model before "
                    f"parallelize; or take engine.full_state_dict(), change the original model, load the weights into "
                    f"it and call parallelize again. New values for an existing parameter are copied into it: "
                    f"parameter.copy_(values) under torch.no_grad()"
                )
