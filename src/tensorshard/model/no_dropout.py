"""Dropout left out of a run in training, so that two runs on different shapes compute the same."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.model.provenance import run_operation
from tensorshard.torch_private.modules import DropoutBase

# Functions that return their first argument where they drop nothing.
_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    }
)
# Functions that drop inside of them, and the place of the probability among their arguments.
_WITH_PROBABILITY: dict[Callable[..., Any], int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
}


class WithoutDropout(TorchFunctionMode):
    """A context in which torch's functions drop nothing, whatever probability they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = _WITH_PROBABILITY.get(func)
        if place is not None:
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return run_operation(func, args, kwargs)


def train_without_dropout(module: nn.Module) -> None:
    """Puts `module` in training mode, its dropout layers in evaluation. Functions are left: see above."""
    for inner in module.modules():
        inner.training = not isinstance(inner, DropoutBase)
