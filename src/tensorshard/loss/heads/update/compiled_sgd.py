"""A step of SGD on rows of 16 or 8 bits, in one pass over memory.

With the functions of :mod:`tensorshard.loss.heads.tiles.rounding`, torch needs about twenty passes. The C code here
computes the same with the same random bits.
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any

import torch

from tensorshard.host.compiled_c import compile_c, in_threads
from tensorshard.torch_private.dispatch import has_dispatch_mode

_SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { float keep, decay, step; int32_t complete; } Numbers;

static inline float of_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float load_float(float value) { return value; }
static inline float load_bfloat16(uint16_t value) { return of_bits((uint32_t)value << 16); }
static inline float store_float(float value, int32_t random) { (void)random; return value; }
static inline uint16_t store_bfloat16(float value, int32_t random) { return (bits_of(value) + random) >> 16; }

typedef uint16_t bfloat16;

/* The momentum of element i, and the weight's step where the gradient is complete. */
#define STEP(WEIGHT)                                                                              \
    m = m * n.keep + gradient[i];                                                                 \
    if (n.complete) {                                                                             \
        const float w = load_##WEIGHT(weight[i]);                                                 \
        m = __builtin_fmaf(w, n.decay, m);                                                        \
        weight[i] = store_##WEIGHT(__builtin_fmaf(m, n.step, w), of_weight[i]);                   \
    }

#define ROWS(WEIGHT, MOMENTUM)                                                                    \
    void WEIGHT##_##MOMENTUM(WEIGHT *restrict weight, MOMENTUM *restrict momentum,                \
                             const float *restrict gradient, const int32_t *restrict of_weight,   \
                             const int32_t *restrict of_momentum, int64_t count,                  \
                             const Numbers *numbers) {                                            \
        const Numbers n = *numbers;                                                               \
        for (int64_t i = 0; i < count; i++) {                                                     \
            float m = load_##MOMENTUM(momentum[i]);                                               \
            STEP(WEIGHT)                                                                          \
            momentum[i] = store_##MOMENTUM(m, of_momentum[i]);                                    \
        }                                                                                         \
    }

ROWS(bfloat16, float)
ROWS(bfloat16, bfloat16)
ROWS(float, bfloat16)

/* Momenta of 8 bits: code c of a block of scale s stands for s * c * |c| / 127^2. `room` holds a block. */
#define BLOCKS(WEIGHT)                                                                            \
    void WEIGHT##_codes(WEIGHT *restrict weight, int8_t *restrict codes, float *restrict scales,  \
                        const float *restrict gradient, const int32_t *restrict of_weight,        \
                        const int32_t *restrict of_momentum, int64_t blocks, int64_t size,        \
                        float *restrict room, const Numbers *numbers) {                           \
        const Numbers n = *numbers;                                                               \
        for (int64_t b = 0; b < blocks; b++) {                                                    \
            const float unit = scales[b] / 16129.0f;                                              \
            uint32_t largest = 0;                                                                 \
            for (int64_t i = 0; i < size; i++) {                                                  \
                const float code = codes[i];                                                      \
                float m = code * fabsf(code) * unit;                                              \
                STEP(WEIGHT)                                                                      \
                room[i] = m;                                                                      \
                const uint32_t magnitude = bits_of(m) & 0x7FFFFFFFu;                              \
                largest = magnitude > largest ? magnitude : largest;                              \
            }                                                                                     \
            const float scale = of_bits(largest), inverse = 1.0f / scale * 16129.0f;              \
            const float factor = inverse <= 3.4028235e38f ? inverse : 0.0f;                       \
            for (int64_t i = 0; i < size; i++) {                                                  \
                const float magnitude = fabsf(room[i]) * factor;                                  \
                const float floor = floorf(sqrtf(magnitude));                                     \
                const float up = (magnitude - floor * floor) / (floor * 2.0f + 1.0f) * 65536.0f;  \
                const float level = floor + ((float)of_momentum[i] < up ? 1.0f : 0.0f);           \
                const int32_t code = level < 127.0f ? (int32_t)level : 127;                       \
                codes[i] = (int8_t)(room[i] < 0.0f ? -code : code);                               \
            }                                                                                     \
            scales[b] = scale;                                                                    \
            weight += size, codes += size, gradient += size, of_weight += size, of_momentum += size; \
        }                                                                                         \
    }

BLOCKS(bfloat16)
BLOCKS(float)
"""
_MULTIPLE = 64  # elements: whole cache lines
_LEAST = 1 << 15  # elements that are worth a thread
_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.int8: "codes"}


class _Numbers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("keep", "decay", "step")] + [("complete", ctypes.c_int32)]


def does(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether :func:`step` takes such rows: contiguous ones in host memory, of which weight or momentum is narrower
    than fp32."""
    tensors = (weight, momentum, gradient)
    return (
        (weight.dtype, momentum.dtype) in _combinations()
        and gradient.dtype == torch.float32
        and all(type(t) is torch.Tensor and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and not has_dispatch_mode()
        and _functions() is not None
    )


def step(
    weight: torch.Tensor,
    momentum: torch.Tensor,
    scales: torch.Tensor | None,
    gradient: torch.Tensor,
    *,
    keep: float,
    weight_decay: float,
    lr: float | None,
    weight_bits: torch.Tensor,
    momentum_bits: torch.Tensor,
) -> None:
    """m = keep * m + g; then, unless `lr` is None, m += weight_decay * w and w -= lr * m. In place, rounded as stored.

    Args:
        weight, momentum: rows for which :func:`does` is True.
        gradient: of their shape.
        scales: [rows, blocks], of 8-bit momenta; else None.
        weight_bits, momentum_bits: of their shape, int32: 16 random bits for each element that is rounded.
    """
    functions = _functions()
    assert functions is not None
    numbers = ctypes.byref(_Numbers(keep, weight_decay, 0.0 if lr is None else -lr, lr is not None))
    function = functions[_name(weight.dtype, momentum.dtype)]

    def addresses(start: int, *tensors: torch.Tensor) -> list[int]:
        return [tensor.data_ptr() + start * tensor.element_size() for tensor in tensors]

    def rows(start: int, end: int) -> None:
        function(*addresses(start, weight, momentum, gradient, weight_bits, momentum_bits), end - start, numbers)

    def blocks(start: int, end: int) -> None:
        assert scales is not None
        first, room = start * size, torch.empty(size)
        function(
            *addresses(first, weight, momentum),
            *addresses(start, scales),
            *addresses(first, gradient, weight_bits, momentum_bits),
            end - start, size, room.data_ptr(), numbers,
        )  # fmt: skip

    if scales is None:
        in_threads(weight.numel(), rows, multiple=_MULTIPLE, least=_LEAST)
        return
    size = weight.numel() // max(1, scales.numel())
    in_threads(scales.numel(), blocks, multiple=1, least=max(1, _LEAST // max(1, size)))


def _name(weight: torch.dtype, momentum: torch.dtype) -> str:
    return f"{_NAMES[weight]}_{_NAMES[momentum]}"


@cache
def _combinations() -> list[tuple[torch.dtype, torch.dtype]]:
    pairs = product((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16, torch.int8))
    return [pair for pair in pairs if pair != (torch.float32, torch.float32)]


@cache
def _functions() -> Mapping[str, Callable[..., Any]] | None:
    library = compile_c(_SOURCE)
    if library is None:
        return None
    functions = {}
    for pair in _combinations():
        name, pointers = _name(*pair), [ctypes.c_void_p] * 5
        function = functions[name] = getattr(library, name)
        tail = [ctypes.c_int64, ctypes.c_void_p]
        if pair[1] == torch.int8:
            pointers, tail = [ctypes.c_void_p] * 6, [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        function.argtypes, function.restype = [*pointers, *tail], None
    return functions
