"""Positions that a model counts itself: ``torch.arange(T)`` is cut where T is the length of a sequence.

What the model makes of it, such as masks, biases and rotations, then has this rank's rows only.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tensorshard.context_parallel.active_groups import active, replace_while_active
from tensorshard.context_parallel.layout_changes import cut_for


def _cutting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def arange(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        activation = active()
        if activation is None or kwargs.get("out") is not None or kwargs.get("requires_grad"):
            return out
        layout = activation.layouts.get(len(out))
        return out if layout is None else cut_for(out, 0, layout, activation.group)

    return arange


def register() -> None:
    """Cuts positions while a thread works for a group."""
    replace_while_active(torch, "arange", _cutting)
