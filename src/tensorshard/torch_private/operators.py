"""Operators without a public name, and the schemas of operators.

`OpOverload`: the class of the operators that a dispatch mode sees. It tells them from others (higher-order ones).

Why: a recorder can only replay plain operators.

Checked: torch 2.13 and 2.15.

Public way: ``type(torch.ops.aten.add.Tensor)``, which type checkers do not follow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = [
    "ATTENTION_KERNELS",
    "FUSED_UPDATES",
    "OpOverload",
    "assert_async",
    "flop_formula",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "fused_adam_",
    "schema",
    "unscale_",
]

_aten = torch.ops.aten

# The operators that F.scaled_dot_product_attention calls, one for each kind of kernel.
# Why: selective recomputation keeps their results, which cost the most to compute again.
# Checked: torch 2.13 and 2.15. Public way: none.
ATTENTION_KERNELS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_attention_math.default,
    }
)

# The operators that fused optimizers call on lists of weights, gradients and states. They update elements one by one.
# Why: shards are updated as plain tensors, since DTensor would first compare the placements of all of them.
# Checked: torch 2.13 and 2.15. Public way: none.
FUSED_UPDATES = frozenset(
    overload
    for packet in (_aten._fused_adam_, _aten._fused_adamw_, _aten._fused_adagrad_, _aten._fused_sgd_)
    for overload in (getattr(packet, name) for name in packet.overloads())
)


def schema(operator: Any) -> Any:
    """The schema of `operator`: its name, its arguments, and which of them it writes to (``alias_info``).

    Why: a tracer has to know what an operator changes in place.

    Checked: torch 2.13 and 2.15.

    Public way: ``operator.name()`` for the name; none for the rest.
    """
    return operator._schema


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> Sequence[torch.Tensor]:
    """The norm of each of `tensors`, in few kernels, summed in `dtype` if given, else in the tensors' own type.

    Why: the norm of a model's gradient is taken every step.

    Checked: torch 2.13 and 2.15.

    Public way: ``torch.linalg.vector_norm`` of each: a kernel for every tensor.
    """
    return torch._foreach_norm(tensors, order, dtype=dtype)


def flop_formula(packet: Any) -> Callable[..., int] | None:
    """The function that counts an operator's floating-point operations, called as ``FlopCounterMode`` calls it; None if
    torch has none.

    Why: estimates count them without a mode around what runs.

    Checked: torch 2.13 and 2.15.

    Public way: ``FlopCounterMode``, which counts what is run in it.
    """
    from torch.utils.flop_counter import flop_registry  # brings a part of torch that estimates alone need

    return flop_registry.get(packet)


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each of `sources` to its target, perhaps of another type or device, in few kernels.

    Why: weights in 16 bits are written from their masters every step.

    Checked: torch 2.13 and 2.15.

    Public way: ``Tensor.copy_`` of each: a kernel for every tensor.
    """
    torch._foreach_copy_(targets, sources)


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiplies each of `tensors` by `factor`, in place, in few kernels.

    Why: clipping scales every gradient, every step.

    Checked: torch 2.13 and 2.15.

    Public way: ``Tensor.mul_`` of each: a kernel for every tensor.
    """
    torch._foreach_mul_(tensors, factor)


def unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiplies each gradient by `inverse_scale`, in place, and sets `found_inf` to 1 where one is not finite.

    Why: if a ``GradScaler``'s gradients are sharded, each rank unscales its own shards.

    Checked: torch 2.13 and 2.15.

    Public way: ``torch.isfinite`` and ``Tensor.mul_`` of each: several kernels for every tensor.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Stops the process later on if `condition` is false. On a GPU, nothing waits for the result.

    Why: indices are checked before each lookup, as torch's own kernels check them.

    Checked: torch 2.13 and 2.15.

    Public way: ``assert condition.item()``, which waits for the device.
    """
    torch._assert_async(condition, message)


def fused_adam_(
    weights: torch.Tensor, gradient: torch.Tensor, states: Sequence[torch.Tensor], step: torch.Tensor, options: Any
) -> None:
    """One fused update of Adam or AdamW, in place.

    Args:
        states: averages of gradients, of their squares and, with amsgrad, the largest of these.
        step: the count of steps, this one included.
        options: of the parameter's optimizer group.

    Why: the optimizers' functions around it take as long as the update of a tile.

    Checked: torch 2.13 and 2.15.

    Public way: ``torch.optim.adam.adam``.
    """
    update = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    update(
        [weights],
        [gradient],
        [states[0]],
        [states[1]],
        [states[2]] if options["amsgrad"] else [],
        [step],
        amsgrad=options["amsgrad"],
        lr=options["lr"],
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )
