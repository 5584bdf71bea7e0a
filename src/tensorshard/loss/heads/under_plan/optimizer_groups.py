"""The parameter group with which an SGD trains a head as the head's own update would."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class HeadGroup:
    """One head's group.

    Args:
        head: name of the module in the model.
        parameters: the names of its parameters.
        lr, momentum, weight_decay: of SGD.
    """

    head: str
    parameters: tuple[str, ...]
    lr: float
    momentum: float
    weight_decay: float

    def describe(self) -> str:
        """Its options, in words."""
        return f"lr={self.lr}, momentum={self.momentum}, weight_decay={self.weight_decay}"


def add_head_group(optimizer: torch.optim.Optimizer, head: HeadGroup, masters: Mapping[str, nn.Parameter]) -> None:
    """Adds the group of `head` to `optimizer`, with the head's own options.

    Every rank of a pipeline has the group, so that schedulers and checkpoints see the same groups on all. On ranks
    without the head it trains nothing.

    Raises:
        ValueError: the optimizer is not a ``torch.optim.SGD``.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise ValueError(
            f"module {head.head!r} is a ParallelLinearCrossEntropy built with update=, which is SGD with "
            f"{head.describe()}. Under a plan the optimizer does that in a parameter group of its own, but "
            f"optimizer(parameters) made {_with_article(type(optimizer).__name__)}: use "
            f"optimizer=functools.partial(torch.optim.SGD, lr=...) for the rest, or build the head without update=, so "
            f"that it is trained like the rest"
        )
    held = [(name, masters[name]) for name in head.parameters if name in masters]
    held = held or [(f"none of {head.head}", nn.Parameter(torch.empty(0)))]
    named = "param_names" in optimizer.param_groups[0]  # torch needs names for all groups or for none
    optimizer.add_param_group(
        {
            "params": held if named else [parameter for _, parameter in held],
            "lr": head.lr,
            "momentum": head.momentum,
            "weight_decay": head.weight_decay,
            "dampening": 0,
            "nesterov": False,
            "maximize": False,
            "head": head.head,
        }
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"
