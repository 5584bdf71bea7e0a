"""What the cases of other people's packages have in common: they are imported when built, and drop nothing."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import Batches, class_loss, numbers
from benchmarks.models.case import Case, Loss


def case(
    name: str,
    module: str,
    build: Callable[[Any], nn.Module],
    batch: Batches | None = None,
    loss: Loss = class_loss,
    *,
    package: str = "",
    is_sequence: bool = False,
) -> Case:
    """A case of a package, listed in its name's group.

    Args:
        module: what `build` is given, imported only then. Its first part is what has to be installed.
        package: as on PyPI, if that is not the module's first part.
    """
    root = module.split(".", maxsplit=1)[0]
    package = package or root.replace("_", "-")
    return Case(
        f"{package}: {name}", "packages", partial(_built, module, build), batch or numbers(8, targets="classes"), loss,
        package, is_sequence=is_sequence, needs=root,
    )  # fmt: skip


def _built(module: str, build: Callable[[Any], nn.Module]) -> nn.Module:
    return build(import_module(module))


class Through(nn.Module):
    """A part between a layer that makes its features and one that makes classes of them.

    Args:
        pool: dimensions of the part's output to average over.
    """

    def __init__(self, first: nn.Module, part: nn.Module, last: nn.Module, pool: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first, self.part, self.last, self.pool = first, part, last, pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(self.first(x))
        if isinstance(x, tuple):
            x = x[0]
        return self.last(x.mean(self.pool) if self.pool else x)


class First(nn.Module):
    """The first of a part's outputs."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)[0]


def own_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """The loss that the model's forward computes by itself, the mean over samples; its last output, if of several."""
    losses = output[-1] if isinstance(output, tuple) else output
    return losses.mean()
