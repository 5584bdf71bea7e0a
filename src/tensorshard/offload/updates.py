"""Updates of torch's optimizers, a tile at a time: the same kernels on views, so the same results to the last bit.

A tile's gradient, weights and states fit in a processor's cache. So casting and clipping its gradient, its update and
the 16-bit copy of its weights together read and write main memory once. One pass over the whole model for each of them
would do so several times. The kernels are those that the optimizer itself calls, and they compute element by element.
Only at a tensor's end, which may not be a whole vector, a kernel may round differently. So tiles begin at multiples of
:data:`~tensorshard.offload.tiers.TILE_ALIGNMENT`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from tensorshard.torch_private.operators import fused_adam_

States = dict[str, torch.Tensor | None]
"""A tile's states by their keys; None for a state that begins with this update. The update then sets it."""

TileUpdate = Callable[[Mapping[str, Any], torch.Tensor, torch.Tensor, States, torch.Tensor], None]
"""Called with a parameter group's options, a tile's weights, gradient and states, and the count of earlier steps (which
it does not change)."""


def _adam(
    group: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, states: States, step: torch.Tensor
) -> None:
    amsgrad = group["amsgrad"]
    if group["fused"] and all(isinstance(value, float | int) for value in (group["lr"], *group["betas"])):
        fused_adam_(weights, gradient, [_given(state) for state in states.values()], step + 1, group)
        return
    adam(
        [weights],
        [gradient],
        [_given(states["exp_avg"])],
        [_given(states["exp_avg_sq"])],
        [_given(states["max_exp_avg_sq"])] if amsgrad else [],
        [step.clone()],  # the kernel adds to it
        foreach=group["foreach"],
        fused=group["fused"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=amsgrad,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _sgd(
    group: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, states: States, step: torch.Tensor
) -> None:
    momentum: list[torch.Tensor | None] = [states.get("momentum_buffer")]
    sgd(
        [weights],
        [gradient],
        momentum,
        foreach=group["foreach"],
        fused=group["fused"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    if "momentum_buffer" in states:
        states["momentum_buffer"] = momentum[0]


def _adagrad(
    group: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, states: States, step: torch.Tensor
) -> None:
    adagrad(
        [weights],
        [gradient],
        [_given(states["sum"])],
        [step.clone()],
        foreach=group["foreach"],
        fused=group["fused"],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _given(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None
    return state


_UPDATES: dict[type, TileUpdate] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}


def tile_update(optimizer: torch.optim.Optimizer) -> TileUpdate | None:
    """The update of one tile, if the kernels of `optimizer` are known here and it has common options; else None."""
    unusual = any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)
    return None if unusual else _UPDATES.get(type(optimizer))


def state_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Sequence[str]:
    """The states of a parameter's shape that an optimizer with a :func:`tile_update` keeps for `group`."""
    if isinstance(optimizer, torch.optim.Adam):
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("sum",)


def begins_with_gradient(key: str) -> bool:
    """Whether the state `key` has no value before the first update, which makes it from the gradient."""
    return key == "momentum_buffer"


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` keeps a count of steps for each parameter."""
    return not isinstance(optimizer, torch.optim.SGD)


def initial_step(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.Tensor:
    """The count of steps before the first one, of the type that the optimizer itself uses."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32)
