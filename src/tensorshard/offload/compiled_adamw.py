"""AdamW in one pass over memory: gradients scaled, weights and states updated, 16-bit weights written.

A few lines of C, which are compiled when they are first needed. They do the same operations in the same order as
torch's fused kernel, and that is checked. Without a compiler, or if a bit differs, torch's kernels are used, in several
passes.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from tensorshard.host.compiled_c import compile_c, in_threads
from tensorshard.torch_private.operators import fused_adam_

_SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { float decay, average, beta2, square, correction, eps, step, factor; } Numbers;

static inline uint16_t to_bfloat16(float value) {  /* to the nearest, of two as near to the even one */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0 : rounded;
}

#define UPDATE(NAME, GRADIENT, COPY)                                                                     \
    void NAME(float *restrict weights, const float *restrict gradient, float *restrict average,          \
              float *restrict square, uint16_t *restrict copy, int64_t count, const Numbers *numbers) {  \
        const Numbers n = *numbers;                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                            \
            const float g = GRADIENT;                                                                    \
            const float m = __builtin_fmaf(n.average, g - average[i], average[i]);                       \
            const float v = __builtin_fmaf(n.square * g, g, square[i] * n.beta2);                        \
            const float w = weights[i] * n.decay + n.step * m / (sqrtf(v) / n.correction + n.eps);       \
            average[i] = m;                                                                              \
            square[i] = v;                                                                               \
            weights[i] = w;                                                                              \
            COPY;                                                                                        \
        }                                                                                                \
    }

UPDATE(update, gradient[i], (void)copy)
UPDATE(update_scaled, gradient[i] * n.factor, (void)copy)
UPDATE(update_copied, gradient[i], copy[i] = to_bfloat16(w))
UPDATE(update_scaled_copied, gradient[i] * n.factor, copy[i] = to_bfloat16(w))
"""
_VECTOR = 64  # elements: whole vectors of any processor, and whole cache lines
_LEAST = 1 << 15  # elements that are worth a thread

Update = Callable[..., None]


class _Numbers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("decay", "average", "beta2", "square", "correction", "eps", "step", "factor")
    ]


def does(options: Mapping[str, Any], *tensors: torch.Tensor) -> bool:
    """Whether :func:`update` takes the `options` of a parameter group and such flat tensors."""
    numbers = (options["lr"], *options["betas"], options["eps"], options["weight_decay"])
    return (
        bool(options["fused"])
        and (bool(options["decoupled_weight_decay"]) or not options["weight_decay"])
        and not options["amsgrad"]
        and not options["maximize"]
        and all(isinstance(number, float | int) for number in numbers)
        and options["betas"][0] > 0.5
        and all(type(t) is torch.Tensor and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and _kernels() is not None
    )


def update(
    options: Mapping[str, Any],
    weights: torch.Tensor,
    gradient: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor],
    step: int,
    *,
    factor: float | None,
    copy: torch.Tensor | None,
    kernels: Mapping[tuple[bool, bool], Update] | None = None,
) -> int:
    """Updates the first elements in place, as many as make whole vectors; returns how many these are.

    Args:
        options: for which :func:`does` is True.
        states: the averages of gradients and of their squares.
        step: the count of steps, this one included.
        factor: multiplies the gradients, as a number of fp32; None for no factor.
        copy: gets the weights in bf16; None for no copy.
        kernels: the ones to use, while they are being checked; None for those that passed the check.
    """
    kernels = kernels or _kernels()
    assert kernels is not None
    count = weights.numel() // _VECTOR * _VECTOR
    lr, (beta1, beta2) = options["lr"], options["betas"]
    numbers = _Numbers(
        decay=1 - lr * options["weight_decay"],
        average=1 - beta1,
        beta2=beta2,
        square=1 - beta2,
        correction=math.sqrt(1 - math.pow(beta2, step)),
        eps=options["eps"],
        step=-(lr / (1 - math.pow(beta1, step))),
        factor=1.0 if factor is None else factor,
    )
    kernel = kernels[factor is not None, copy is not None]
    tensors = (weights, gradient, *states)

    def run(start: int, end: int) -> None:
        addresses = [tensor.data_ptr() + 4 * start for tensor in tensors]
        kernel(*addresses, None if copy is None else copy.data_ptr() + 2 * start, end - start, ctypes.byref(numbers))

    in_threads(count, run, multiple=_VECTOR, least=_LEAST)
    return count


@cache
def _kernels() -> Mapping[tuple[bool, bool], Update] | None:
    """The kernels, by whether gradients are scaled and whether weights are copied; None if they cannot be compiled, or
    differ
        from torch's."""
    library = compile_c(_SOURCE)
    if library is None:
        return None
    kernels: dict[tuple[bool, bool], Update] = {}
    for scaled in (False, True):
        for copied in (False, True):
            kernel = getattr(library, f"update{'_scaled' * scaled}{'_copied' * copied}")
            kernel.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_void_p]
            kernel.restype = None
            kernels[scaled, copied] = kernel
    return kernels if _are_torchs(kernels) else None


@torch.no_grad()
def _are_torchs(kernels: Mapping[tuple[bool, bool], Update]) -> bool:
    """Whether `kernels` compute the same as torch's kernel, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    size = 64 * _VECTOR
    options = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False)
    options["decoupled_weight_decay"] = True
    for scaled, copied in kernels:
        weights = torch.randn(size, generator=generator)
        states = torch.zeros(size), torch.zeros(size)
        copy = torch.zeros(size, dtype=torch.bfloat16)
        expected, *their_states = (tensor.clone() for tensor in (weights, *states))
        for step in range(1, 5):
            gradient = torch.randn(size, generator=generator) * 10.0 ** (1 - step)
            factor = 0.37 if scaled else None
            taken = copy if copied else None
            update(options, weights, gradient, states, step, factor=factor, copy=taken, kernels=kernels)
            theirs = gradient if factor is None else gradient * factor
            fused_adam_(expected, theirs, their_states, torch.tensor(float(step)), options)
        pairs = [(weights, expected), *zip(states, their_states, strict=True)]
        if copied:
            pairs.append((copy, expected.bfloat16()))
        if not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True
