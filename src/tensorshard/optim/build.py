"""Making the optimizer of the parameters that a rank updates."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OptimizerFactory = Callable[..., torch.optim.Optimizer]


def build_optimizer(factory: OptimizerFactory, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of `masters`, on its fastest kernels where the choice was left open.

    Raises:
        TypeError: it made something else.
        ValueError: the optimizer holds parameters that it was not given.
    """
    if not masters:  # of a pipeline's stage nothing may be trained; its optimizer then exists for schedulers' sake
        masters = {"none": nn.Parameter(torch.empty(0))}
    given: Any = list(masters.items()) if _wants_names(factory) else list(masters.values())
    built = factory(given)
    if not isinstance(built, torch.optim.Optimizer):
        raise TypeError(f"optimizer(parameters) returned a {type(built).__name__}; it must return a torch Optimizer")
    known = set(masters.values())
    for group in built.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that it was not given; build "
                    f"it from the parameters that the callable receives"
                )
        # The for-loop that torch chooses on CPUs is 7 times slower; the fused kernel computes the same. Those of other
        # optimizers do not take DTensors.
        is_open = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        if is_open and isinstance(built, torch.optim.Adam | torch.optim.AdamW):
            group["fused"] = True
    return built


def _wants_names(factory: Any) -> bool:
    try:
        return "named_parameters" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
