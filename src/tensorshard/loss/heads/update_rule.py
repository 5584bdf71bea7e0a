"""Stochastic gradient descent with momentum, applied to the rows of a tile as soon as their gradient is known.

Rows of 16 or 8 bits are updated in one pass over memory where they can be. With the functions of
:mod:`tensorshard.loss.kernels`, torch needs about twenty passes. The C code here computes the same with the same random
bits.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from tensorshard.host.compiled_c import compile_c, in_threads
from tensorshard.loss.kernels import Kernels, Noise, choose_kernels
from tensorshard.loss.tiles import Tile, Tiles
from tensorshard.torch_private.dispatch import has_dispatch_mode


@dataclass(frozen=True)
class Rule:
    """The update of a backward pass. m is the momentum, g the gradient, w the weight.

    m = keep * m + g; and if `complete`: m += weight_decay * w, w -= lr * m. In the first micro-batch of a step, `keep`
    is the momentum's factor; in later ones it is 1. Only the last one is complete. Together this is the update that
    ``torch.optim.SGD`` makes with the sum of their gradients.
    """

    keep: float
    complete: bool
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class ParameterShard:
    """A rank's part of a parameter and its momentum.

    Args:
        weight: fp32, fp64, or bf16, which is rounded stochastically.
        momentum: of the same shape: in the wide type, bf16, or 8-bit codes.
        scales: of 8-bit codes, else None.
    """

    weight: torch.Tensor
    momentum: torch.Tensor
    scales: torch.Tensor | None = None

    def is_wide(self) -> bool:
        """Whether momentum and weight both have the type in which gradients are computed."""
        return self.momentum.dtype == self.weight.dtype and self.weight.dtype in (torch.float32, torch.float64)


class Update:
    """A sink that updates the weight, so that no gradient tensor exists.

    Args:
        weight, bias: what is updated; `bias` is None if there is none.
        seed: of the rounding in this pass.
    """

    def __init__(
        self, tiles: Tiles, weight: ParameterShard, bias: ParameterShard | None, rule: Rule, seed: int
    ) -> None:
        self._tiles, self._weight, self._bias, self._rule = tiles, weight, bias, rule
        # The product is added to the momentum in place. Rows of a sample are copies, so for them it cannot.
        self._direct = weight.is_wide() and tiles.sample is None
        self._grad: torch.Tensor | None = None
        self._room = [] if self._direct else [tiles.new_scratch() for _ in range(2)]
        narrow = any(shard is not None and not shard.is_wide() for shard in (weight, bias))
        width, features = tiles.new_scratch().shape if narrow else (0, 0)
        self._noise = Noise(width * features, seed, tiles.input.device) if narrow else None
        self._kernels = choose_kernels(tiles.input)

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        if not self._direct:
            self.put(tile, self._tiles.multiply(slope, self._tiles.input, self.buffer(tile)))
            return
        momentum = self._weight.momentum[tile.rows]
        self._tiles.add_product(momentum, slope, self._tiles.input, beta=self._rule.keep)
        self._finish(self._weight.weight[tile.rows], momentum)

    def buffer(self, tile: Tile) -> torch.Tensor:
        if self._grad is None:
            self._grad = self._tiles.new_scratch()
        return self._grad[: tile.width]

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        if self._direct:
            momentum = self._weight.momentum[tile.rows].mul_(self._rule.keep).add_(grad)
            self._finish(self._weight.weight[tile.rows], momentum)
        else:
            self._step(self._weight, tile.rows, grad, [room[: tile.width] for room in self._room])

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        if self._bias is not None:
            grad = slope.sum(0)
            self._step(self._bias, tile.rows, grad, [torch.empty_like(grad) for _ in range(2)])

    def _finish(self, weight: torch.Tensor, momentum: torch.Tensor) -> None:
        """Ends the step of some rows, both of the wide type."""
        if self._rule.complete:
            _sgd_step(weight, momentum, self._rule.weight_decay, self._rule.lr)

    def _step(
        self, shard: ParameterShard, rows: slice | torch.Tensor, grad: torch.Tensor, room: list[torch.Tensor]
    ) -> None:
        """Updates weight and momentum of any type, or rows of a sample, by `grad`. Overwrites `grad` and `room`."""
        if isinstance(rows, slice) and steps_in_one_pass(shard.weight[rows], shard.momentum[rows], grad):
            self._step_in_one_pass(shard, rows, grad)
            return
        momentum, spare = room
        if shard.scales is not None:
            self._kernels.dequantize(shard.momentum[rows], shard.scales[rows], momentum)
        else:
            momentum.copy_(shard.momentum[rows])
        momentum.mul_(self._rule.keep).add_(grad)
        if self._rule.complete:
            weight = grad.copy_(shard.weight[rows])
            _sgd_step(weight, momentum, self._rule.weight_decay, self._rule.lr)
            self._write(shard.weight, rows, weight)
        if shard.scales is None:
            self._write(shard.momentum, rows, momentum)
            return
        assert self._noise is not None
        codes, scales = shard.momentum[rows], shard.scales[rows]
        self._kernels.quantize(momentum, self._noise.bits(momentum.shape), spare, codes, scales)
        if not isinstance(rows, slice):  # a slice shares the shard's memory
            shard.momentum[rows], shard.scales[rows] = codes, scales

    def _step_in_one_pass(self, shard: ParameterShard, rows: slice, grad: torch.Tensor) -> None:
        assert self._noise is not None
        rule, none = self._rule, grad.view(torch.int32)  # in place of random bits that are not read
        rounds_weight = rule.complete and shard.weight.dtype == torch.bfloat16
        sgd_in_one_pass(
            shard.weight[rows],
            shard.momentum[rows],
            None if shard.scales is None else shard.scales[rows],
            grad,
            keep=rule.keep,
            weight_decay=rule.weight_decay,
            lr=rule.lr if rule.complete else None,
            weight_bits=self._noise.bits(grad.shape) if rounds_weight else none,
            momentum_bits=self._noise.bits(grad.shape) if shard.momentum.dtype != torch.float32 else none,
        )

    def _write(self, target: torch.Tensor, rows: slice | torch.Tensor, value: torch.Tensor) -> None:
        """Stores rows in the type of `target`. Overwrites `value`."""
        if target.dtype == torch.bfloat16:
            assert self._noise is not None
            value = self._kernels.round_to_bfloat16_(value, self._noise.bits(value.shape))
        target[rows] = value.to(target.dtype)


def _sgd_step(weight: torch.Tensor, momentum: torch.Tensor, weight_decay: float, lr: float) -> None:
    """m += weight_decay * w; w -= lr * m, in place."""
    if weight_decay:
        momentum.add_(weight, alpha=weight_decay)
    weight.add_(momentum, alpha=-lr)


def finish_step(weight: ParameterShard, bias: ParameterShard | None, rule: Rule, seed: int, rows: int) -> None:
    """Ends a step whose gradients are all in the momentum: updates every row, some `rows` at a time."""
    for shard in (weight, bias):
        if shard is None or not shard.weight.numel():
            continue
        wide = torch.float64 if shard.weight.dtype == torch.float64 else torch.float32
        flat = shard.weight.view(len(shard.weight), -1)
        features = flat.size(1)
        noise = None if shard.is_wide() else Noise(min(rows, len(flat)) * features, seed, flat.device)
        for begin in range(0, len(flat), rows):
            part = slice(begin, begin + rows)
            _finish_rows(shard, part, rule, noise, wide, choose_kernels(flat))


def _finish_rows(
    shard: ParameterShard, rows: slice, rule: Rule, noise: Noise | None, wide: torch.dtype, kernels: Kernels
) -> None:
    weight, stored = shard.weight[rows], shard.momentum[rows]
    if shard.scales is not None:
        momentum = kernels.dequantize(stored, shard.scales[rows], torch.empty_like(stored, dtype=wide))
    else:
        momentum = stored.to(wide)  # `stored` itself, if it has that type
    moved = weight.to(wide)
    _sgd_step(moved, momentum, rule.weight_decay, rule.lr)
    if noise is None:
        return
    if weight.dtype == torch.bfloat16:
        weight.copy_(kernels.round_to_bfloat16_(moved, noise.bits(moved.shape)))
    if shard.scales is not None:
        kernels.quantize(momentum, noise.bits(momentum.shape), torch.empty_like(momentum), stored, shard.scales[rows])
    elif stored.dtype == torch.bfloat16:
        stored.copy_(kernels.round_to_bfloat16_(momentum, noise.bits(momentum.shape)))


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


def steps_in_one_pass(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether :func:`sgd_in_one_pass` takes such rows: contiguous ones in host memory, of which weight or momentum is
    narrower than fp32."""
    tensors = (weight, momentum, gradient)
    return (
        (weight.dtype, momentum.dtype) in _combinations()
        and gradient.dtype == torch.float32
        and all(type(t) is torch.Tensor and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and not has_dispatch_mode()
        and _functions() is not None
    )


def sgd_in_one_pass(
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
        weight, momentum: rows for which :func:`steps_in_one_pass` is True.
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
