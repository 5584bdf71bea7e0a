"""Making the optimizer of the parameters that a rank updates."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensorshard.engine.guards.foreign_optimizers import warn_of_schedulers
from tensorshard.host.process_settings import HostHeap
from tensorshard.model.trains_itself import OwnRule
from tensorshard.passes.precision import master_dtype

OptimizerFactory = Callable[..., torch.optim.Optimizer]


# Optimizers that no plan can step.
_CANNOT = {
    torch.optim.LBFGS: "calls a closure again and again in one step, while a step here has one forward and backward",
    torch.optim.SparseAdam: "takes sparse gradients alone, while gradients here are dense",
}


def build_optimizer(
    factory: OptimizerFactory, masters: Mapping[str, nn.Parameter], rules: Sequence[OwnRule] = ()
) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of `masters`, with its fastest kernels if the user did not choose.

    Args:
        rules: of parameters that are trained in groups of their own; `factory` gets the others.

    Raises:
        TypeError: `factory` made something else.
        ValueError: the optimizer holds parameters that it was not given, or cannot train by the `rules`.
    """
    by_rule = {name for rule in rules for name in rule.parameters}
    built = _build(factory, {name: master for name, master in masters.items() if name not in by_rule})
    for rule in rules:
        rule.add_group(built, masters)
    return built


def check_trains(factory: OptimizerFactory, model: nn.Module, rules: Sequence[OwnRule]) -> None:
    """Refuses an optimizer that cannot train parameters of `model` by `rules`. Nothing is allocated.

    Raises:
        ValueError: `factory` makes another optimizer than a rule needs.
    """
    if not rules:
        return
    # The optimizer's class shows only when one is made. So one is made of placeholders of one number each.
    by_rule = {name for rule in rules for name in rule.parameters}
    trained = {
        name: nn.Parameter(torch.zeros((), dtype=master_dtype(p.dtype)).expand(p.shape))
        for name, p in model.named_parameters()
        if p.requires_grad or name in by_rule
    }
    build_optimizer(factory, trained, rules)


class StepCounter:
    """Counts the optimizer steps of an Engine, and does what follows each of them.

    Args:
        heap: looks at this process's memory; None where it is not looked at.
        warns: whether this rank warns of schedulers.
    """

    def __init__(self, heap: HostHeap | None, *, warns: bool) -> None:
        self.taken = 0
        self._heap = heap
        self._warns = warns

    def count(self) -> None:
        """Called after each step, skipped ones of fp16 included."""
        self.taken += 1
        if self._heap is not None:
            self._heap.after_call()
        if self._warns:
            self._warns = False
            warn_of_schedulers()

    def state_dict(self) -> int:
        return self.taken

    def load_state_dict(self, taken: int) -> None:
        self.taken = taken


def _build(factory: OptimizerFactory, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    if not masters:  # a pipeline's stage may train nothing; it has an optimizer all the same, for schedulers
        masters = {"none": nn.Parameter(torch.empty(0))}
    given: Any = list(masters.items()) if _wants_names(factory) else list(masters.values())
    try:
        built = factory(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer(parameters) failed: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise TypeError(f"optimizer(parameters) returned a {type(built).__name__}; it must return a torch Optimizer")
    if isinstance(built, tuple(_CANNOT)):
        what = next(reason for kind, reason in _CANNOT.items() if isinstance(built, kind))
        raise ValueError(f"the optimizer is a {type(built).__name__}, which {what}; take one such as torch.optim.AdamW")
    known = set(masters.values())
    for group in built.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that it was not given; build "
                    f"it from the parameters that the callable receives"
                )
        # The for-loop that torch chooses on CPUs is 7 times slower; the fused kernel computes the same. Other
        # optimizers run as they were built: their fused kernels are the user's choice.
        is_open = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        if is_open and isinstance(built, torch.optim.Adam | torch.optim.AdamW):
            group["fused"] = True
    return built


def _wants_names(factory: Any) -> bool:
    try:
        return "named_parameters" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
