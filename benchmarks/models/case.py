"""One model to train: how it is built, what it is fed, and its loss."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

Batch = tuple[Any, torch.Tensor]
"""Inputs as for ``Engine.step``, and targets."""

Loss = Callable[[Any, Any], torch.Tensor]


DROPPED = 0.1
"""The share that dropout drops where a configuration says none."""


@dataclass(frozen=True)
class Case:
    """A model with at most a few hundred thousand parameters, its random weights the constructor's own.

    Args:
        name: unique in its family.
        family: the library that it is from: "transformers", "timm", "torchvision", "diffusers", "plain", or
            "packages" for those of other people's packages, a group for each.
        build: makes it; nothing is downloaded. See :meth:`built` for dropout.
        batch: ``batch(samples, generator)`` -> inputs and targets, samples first.
        loss: ``loss(output, targets)`` -> the mean over samples.
        group: a part of the family, such as "text", under which it is listed.
        is_sequence: whether it computes on a sequence of tokens or patches, so that it counts among the models that
            sequence parallelism is for.
        needs: the module that has to be installed, if that is not the family's.
        random: as in the Plan. By rank, dropout is off, since each plan draws other random numbers.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Loss
    group: str = ""
    is_sequence: bool = False
    needs: str = ""
    random: str = "same"

    @property
    def key(self) -> str:
        """How a command line names it."""
        return f"{self.family}/{self.name}"

    def built(self, drops: bool) -> nn.Module:
        """The model, in which dropout is on; or off, with whole residual branches that are left out."""
        share = DROPPED if drops else 0.0
        token = _dropped.set(share)
        try:
            model = self.build()
        finally:
            _dropped.reset(token)
        for module in model.modules():
            if drops:
                if isinstance(module, nn.Dropout) and module.p == 0.0:
                    module.p = share
                continue
            if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":
                module.p = 0.0
            for name in ("drop_prob", "dropout_prob"):  # of residual branches; of classes' labels
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return model


_dropped: ContextVar[float] = ContextVar("dropped", default=0.0)


def dropped() -> float:
    """The share that dropout drops in the model that is being built where a configuration says nothing; 0 for none."""
    return _dropped.get()
