"""Clipping, unscaling and learning rates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# A function of `clip_grad` that clip_grad_norm_ looks up when it is called.
# Why: replacing it reaches scripts that imported clip_grad_norm_ by name.
# Checked: torch 2.13 and 2.15. Public way: replacing clip_grad_norm_ itself, which does not reach those.
TOTAL_NORM = "_get_total_norm"

# The method of GradScaler that unscales an optimizer's gradients. It returns, by device, whether there was an overflow.
# Why: ranks that hold different shards have to agree whether there was one.
# Checked: torch 2.13 and 2.15. Public way: a subclass of GradScaler, where the scaler is not the user's own object.
UNSCALE_GRADIENTS = "_unscale_grads_"

__all__ = [
    "TOTAL_NORM",
    "UNSCALE_GRADIENTS",
    "clip_grad",
    "inner_schedulers",
    "may_skip",
    "set_last_rates",
    "set_unscaling",
    "skipping",
    "step_without_hooks",
    "watched_clipping",
    "with_step_hooks",
]


def set_unscaling(scaler: Any, unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> None:
    """Makes `scaler`, a ``torch.amp.GradScaler``, unscale gradients by `unscale`.

    Args:
        unscale: called with the scaler, the optimizer, the inverse of the scale, a tensor to set to 1 if a
            gradient is not finite, and whether fp16 gradients are allowed. It returns that tensor by device.

    Why: each rank unscales its own shards, and ranks agree whether a gradient was not finite.

    Checked: torch 2.13 and 2.15.

    Public way: a subclass of ``GradScaler``, where the scaler is not the user's own object.
    """
    scaler._unscale_grads_ = MethodType(unscale, scaler)


def set_last_rates(schedule: torch.optim.lr_scheduler.LRScheduler, rates: list[float | torch.Tensor]) -> None:
    """Makes ``schedule.get_last_lr()`` return `rates`.

    Why: a run that is resumed with other peak rates sets the rates of its present step.

    Checked: torch 2.13 and 2.15.

    Public way: ``schedule.load_state_dict``, by the same private name.
    """
    schedule._last_lr = rates


def with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, a method of an optimizer, with the hooks that are registered around steps.

    Why: an optimizer whose step is replaced keeps its hooks.

    Checked: torch 2.13 and 2.15.

    Public way: none; the method is not documented.
    """
    hooked: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(step)
    return hooked


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Runs the update of `optimizer`'s class, without the hooks around a step.

    Why: an offloaded optimizer takes one step in several calls. Hooks (such as gathering parameters) belong around all
    of them. torch wraps each class's ``step`` when the first optimizer of it is made.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def may_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update by `optimizer` can be skipped by its kernel, as :func:`skipping` does. It is torch's Adam or
    AdamW in its fused form, has its states, and no hooks around its steps but tensorshard's.

    Why: SGD makes its states in its first update, and would leave them without values.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``torch.amp.GradScaler`` asks for ``_step_supports_amp_scaling``.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    before = [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*_global_optimizer_post_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if not all((getattr(hook, "__module__", None) or "").startswith("tensorshard.") for hook in (*before, *after)):
        return False
    return all(
        group["fused"] and all(p.grad is None or optimizer.state.get(p) for p in group["params"])
        for group in optimizer.param_groups
    )


@contextmanager
def skipping(optimizer: torch.optim.Optimizer, where: torch.Tensor) -> Iterator[None]:
    """Inside, updates of `optimizer` change nothing where the scalar `where`, in fp32, is 1.

    Why: the update is launched before the host knows whether it is to be taken.

    Checked: torch 2.13 and 2.15.

    Public way: ``torch.amp.GradScaler``, by the same attribute; it reads the value all the same.
    """
    optimizer.found_inf = where  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


@contextmanager
def watched_clipping(before: Callable[[Any], None]) -> Iterator[None]:
    """Inside, `before` is called with the norm each time that gradients are to be clipped by it.

    Why: ``clip_grads_with_norm_``, which ``clip_grad_norm_`` calls, is imported by name in most scripts. What torch's
    ``no_grad`` wraps there is replaced, which reaches all of them.

    Checked: torch 2.13.

    Public way: replacing the two functions in ``torch.nn.utils``, which does not reach those.
    """
    (cell,) = clip_grad._clip_grads_with_norm_.__closure__ or ()
    clip = cell.cell_contents

    def watched(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        before(total_norm)
        clip(parameters, max_norm, total_norm, *args, **kwargs)

    cell.cell_contents = watched
    try:
        yield
    finally:
        cell.cell_contents = clip


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """The schedulers that a ``SequentialLR`` or a ``ChainedScheduler`` calls; none for another `scheduler`.

    Why: each of them sets the rates of an optimizer of its own.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return getattr(scheduler, "_schedulers", ())  # type: ignore[no-any-return]
