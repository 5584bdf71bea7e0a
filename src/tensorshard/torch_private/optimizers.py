"""Clipping, unscaling and learning rates."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.utils import clip_grad

# A function of `clip_grad` that clip_grad_norm_ looks up when it is called.
# Why: replacing it reaches scripts that imported clip_grad_norm_ by name.
# Checked: torch 2.11 and 2.13. Public way: replacing clip_grad_norm_ itself, which does not reach those.
TOTAL_NORM = "_get_total_norm"

# The method of GradScaler that unscales an optimizer's gradients and returns where it found an overflow, by device.
# Why: ranks that hold different shards agree whether there was one.
# Checked: torch 2.11 and 2.13. Public way: a subclass of GradScaler, where the scaler is not the user's own object.
UNSCALE_GRADIENTS = "_unscale_grads_"

__all__ = ["TOTAL_NORM", "UNSCALE_GRADIENTS", "clip_grad", "set_last_rates", "set_unscaling", "step_without_hooks"]


def set_unscaling(scaler: Any, unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> None:
    """Has `scaler`, a ``torch.amp.GradScaler``, unscale gradients by `unscale`.

    Args:
        unscale: called with the scaler, the optimizer, the inverse of the scale, a tensor that is to be 1 where a
            gradient is not finite, and whether fp16 gradients are allowed; returns that tensor by device.

    Why: shards are unscaled on their own, and ranks agree whether a gradient was not finite.

    Checked: torch 2.11 and 2.13.

    Public way: a subclass of ``GradScaler``, where the scaler is not the user's own object.
    """
    scaler._unscale_grads_ = MethodType(unscale, scaler)


def set_last_rates(schedule: torch.optim.lr_scheduler.LRScheduler, rates: list[float | torch.Tensor]) -> None:
    """Has ``schedule.get_last_lr()`` return `rates`.

    Why: a run that is resumed under other peak rates sets those of the step that it stands at.

    Checked: torch 2.11 and 2.13.

    Public way: ``schedule.load_state_dict``, by the same private name.
    """
    schedule._last_lr = rates


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The update of `optimizer`'s class, without what hooks around a step do.

    Why: an offloaded optimizer takes one step in several calls, and hooks (gathering parameters among them) belong
    around all of them. torch wraps each class's ``step`` when the first optimizer of it is made.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
