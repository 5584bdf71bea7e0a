"""Heads with ``update=`` under a plan: their backward leaves gradients, and SGD trains them.

Between backward and update, a plan sums gradients over ranks, clips them, or skips a step. So it needs a gradient. The
update inside backward is switched off, and its rule becomes a parameter group of the optimizer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorshard.loss.heads.under_plan.head_checks import find_heads
from tensorshard.loss.heads.under_plan.optimizer_groups import HeadGroup
from tensorshard.passes.precision import master_dtype
from tensorshard.torch_private.modules import own_parameters

logger = logging.getLogger("tensorshard")


@dataclass(frozen=True)
class HeadUpdate:
    """The update that a head would do by itself.

    Args:
        head: name of the module.
        parameters: the names of its parameters.
        options: the options of its optimizer, with the optimizer's other notes.
        tied: names of other modules' parameters that are the same as the head's.
    """

    head: str
    parameters: tuple[str, ...]
    options: dict[str, Any]
    tied: tuple[str, ...]

    def group(self) -> HeadGroup:
        """The parameter group that makes the same update."""
        lr, momentum, weight_decay = (float(self.options[name]) for name in ("lr", "momentum", "weight_decay"))
        return HeadGroup(self.head, self.parameters, lr, momentum, weight_decay)


def find_updates(model: nn.Module) -> list[HeadUpdate]:
    """The updates of those heads of `model` that were built with ``update=``. The model is left as it is."""
    found = []
    for name, head in find_heads(model).items():
        if head.optimizer is not None:
            own = dict(head.named_parameters(recurse=False))
            options = {key: value for key, value in head.optimizer.group.items() if key != "params"}
            parameters = tuple(f"{name}.{key}" if name else key for key in own)
            found.append(HeadUpdate(name, parameters, options, _others_with(model, head, list(own.values()))))
    return found


def take_updates(model: nn.Module) -> list[HeadUpdate]:
    """Finds the updates of `model`'s heads and switches them off.

    The heads then leave gradients in new parameters, which share the old ones' memory.
    """
    found = find_updates(model)
    for update in found:
        head = find_heads(model)[update.head]
        head.optimizer = None
        for key, parameter in list(head.named_parameters(recurse=False)):
            vars(parameter).pop("_optimizer", None)  # it refers back to the parameter, and would keep both alive
            taken = nn.Parameter(parameter.detach())
            vars(taken).update(vars(parameter))
            setattr(head, key, taken)
    return found


def check_updates(model: nn.Module, updates: Sequence[HeadUpdate]) -> None:
    """Refuses `updates` of heads of `model` that a plan could not do exactly. Nothing is allocated.

    Raises:
        ValueError: a weight is tied; a weight or momentum is narrower than fp32; classes are sampled with a momentum; a
            step is half done; a scheduler is on the head's own optimizer.
    """
    heads = find_heads(model)
    for update in updates:
        problem = _problem(update, heads[update.head].weight.dtype, heads[update.head].sample_rate)
        if problem:
            raise ValueError(
                f"module {update.head!r} is a ParallelLinearCrossEntropy built with update=, whose parameters a plan "
                f"trains from gradients, by SGD on fp32 masters; {problem}"
            )


def log_updates(updates: Sequence[HeadUpdate]) -> None:
    """Logs how the updates are done now."""
    for update in updates:
        steps = update.options["step"]
        logger.warning(
            "module %r was built with update=, but a plan needs its gradients, which take the memory of its weight "
            "once more; engine.optimizer trains it in a parameter group of its own: SGD with %s%s",
            update.head,
            update.group().describe(),
            f", whose momentum begins anew after the {steps} steps of head.optimizer" if steps else "",
        )


def _problem(update: HeadUpdate, dtype: torch.dtype, sample_rate: float) -> str | None:
    options = update.options
    if update.tied:
        return (
            f"its weight is also {', '.join(map(repr, update.tied))}, whose part of the gradient update= leaves out: "
            f"build the head without update=, or do not tie it"
        )
    if master_dtype(dtype) != dtype:
        return (
            f"its weight is of {str(dtype).removeprefix('torch.')}, which would not stay so narrow: build it with "
            f"dtype=torch.float32 (Plan(precision='bf16') computes in bf16), or train without a Plan"
        )
    if options["momentum_dtype"] != "fp32":
        return (
            f"its momentum of momentum_dtype={options['momentum_dtype']!r} would be as wide as the weight: leave "
            f"momentum_dtype out (zero=1 to 3 split the momentum over dp_shard), or train without a Plan"
        )
    if sample_rate < 1 and (options["momentum"] or options["weight_decay"]):
        return (
            f"with sample_rate={sample_rate} that would move the classes outside of a step's sample as well, by "
            f"momentum={options['momentum']} and weight_decay={options['weight_decay']}: build it with both at 0, with "
            f"sample_rate=1, or without update="
        )
    if options["pending"]:
        return (
            "micro-batches are in its momentum whose step was not ended, and a plan begins with a momentum of its own: "
            "call head.optimizer.step() first"
        )
    if "initial_lr" in options:
        return (
            "a learning-rate scheduler was built on head.optimizer, which does nothing then: build it on "
            "engine.optimizer, which has a parameter group of the head"
        )
    return None


def _others_with(model: nn.Module, head: nn.Module, parameters: list[nn.Parameter]) -> tuple[str, ...]:
    """Names that the `parameters` of `head` have in other modules."""
    others = []
    for prefix, module in model.named_modules():
        for key, parameter in own_parameters(module).items():
            if module is not head and any(parameter is own for own in parameters):
                others.append(f"{prefix}.{key}" if prefix else key)
    return tuple(others)
