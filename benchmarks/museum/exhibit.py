"""What a silent fault of the field is described by, so that `ts.verify_layout` can be asked to find and name it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, Callable[[int], Any]]]


@dataclass(frozen=True)
class Exhibit:
    """One silent fault, rebuilt small from its public report.

    Args:
        name: short, such as "tied weights that the last rank never updates".
        report: the public issue or pull request, such as "pytorch/pytorch#176076".
        said: what went wrong, in one or two sentences.
        reference: builds the model and its step on one process. The step takes the number of the training step.
        parallel: builds the same with the fault, on each rank.
        kinds: the right names of the fault, of `ts.verify_layout`'s kinds.
        module: the module where the fault begins, if there is one.
        ranks: how many ranks the layout has.
        gather: makes a rank's part of a tensor whole, where the layout splits it by hand.
        correct: builds the same layout without the fault. It must be found exact.
    """

    name: str
    report: str
    said: str
    reference: Build
    parallel: Build
    kinds: frozenset[str]
    module: str | None = None
    ranks: int = 2
    gather: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    correct: Build | None = None
