"""One model to train: how it is built, what it is fed, and its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[Any, torch.Tensor]
"""Inputs as for ``Engine.step``, and targets."""

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model with at most a few hundred thousand parameters, its random weights the constructor's own.

    Args:
        name: unique in its family.
        family: the library that it is from: "transformers", "timm", "torchvision", "diffusers", "plain", or
            "packages" for those of other people's packages, a group for each.
        build: makes it; nothing is downloaded. Dropout is off, since each plan draws other random numbers.
        batch: ``batch(samples, generator)`` -> inputs and targets, samples first.
        loss: ``loss(output, targets)`` -> the mean over samples.
        group: a part of the family, such as "text", under which it is listed.
        is_sequence: whether it computes on a sequence of tokens or patches, so that it counts among the models that
            sequence parallelism is for.
        needs: the module that has to be installed, if that is not the family's.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Loss
    group: str = ""
    is_sequence: bool = False
    needs: str = ""

    @property
    def key(self) -> str:
        """How a command line names it."""
        return f"{self.family}/{self.name}"


def without_dropout(model: nn.Module) -> nn.Module:
    """`model`, whose layers drop nothing any more: neither single numbers nor whole residual branches."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for name in ("drop_prob", "dropout_prob"):  # of residual branches; of classes' labels
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
