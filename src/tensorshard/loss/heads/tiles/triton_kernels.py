"""The operations on a tile of logits and on its states as kernels written in Triton, with one launch each.

They compute what the functions of the same names in :mod:`kernels`, :mod:`tensorshard.loss.softmax_cross_entropy` and
:mod:`rounding` compute, except for the order of sums. The online softmax reads a row the second time while it is still
in the cache. 8-bit codes are made from a block that is read once, without extra memory. The target's column, one number
a sample, is left to PyTorch.

This module needs Triton, and is imported only if it is chosen.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_WIDEST_BLOCK = 4096  # elements that a program holds at a time
_LEVELS = tl.constexpr(127)  # of 8-bit codes, as in `rounding`


@triton.jit
def _online_softmax(logits, reference, total, after, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row [width], which takes it in `PARTS` of a `BLOCK`."""
    row = tl.program_id(0)
    begin = logits + row.to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    dtype = logits.dtype.element_ty
    largest = tl.full([BLOCK], -float("inf"), dtype)
    for part in range(PARTS):
        column = part * BLOCK + columns
        largest = tl.maximum(largest, tl.load(begin + column, mask=column < width, other=-float("inf")))
    before = tl.load(reference + row)
    now = tl.maximum(before, tl.max(largest, 0))
    summed = tl.zeros([BLOCK], dtype)
    for part in range(PARTS):
        column = part * BLOCK + columns
        exponential = tl.exp(tl.load(begin + column, mask=column < width, other=0.0) - now)
        tl.store(begin + column, exponential, mask=column < width)
        summed += tl.where(column < width, exponential, 0.0)
    scaled = tl.load(total + row) * tl.exp((before - now).to(tl.float64))
    tl.store(total + row, scaled + tl.sum(summed, 0).to(tl.float64))
    tl.store(after + row, now)


def online_softmax(logits: torch.Tensor, reference: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Computes :func:`kernels.online_softmax` on contiguous tensors, one program a row.

    With few samples, a GPU is not fully used.
    """
    rows, width = logits.shape
    after = torch.empty_like(reference)
    _check_contiguous(logits, reference, total)
    if rows:
        block = _block(width)
        with torch.cuda.device_of(logits):
            _online_softmax[(rows,)](
                logits, reference, total, after, width, PARTS=triton.cdiv(width, block), BLOCK=block, num_warps=8
            )
    return after


@triton.jit
def _softmax_slope(logits, reference, of_softmax, smoothing, class_weight, width, BLOCK: tl.constexpr):
    """A program for each part of a row [width]."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = logits + row.to(tl.int64) * width + columns
    exponential = tl.exp(tl.load(place, mask=inside, other=0.0) - tl.load(reference + row))
    slope = exponential * tl.load(of_softmax + row)
    if smoothing is not None:
        share = tl.load(smoothing + row)
        if class_weight is not None:
            slope -= share * tl.load(class_weight + columns, mask=inside, other=0.0)
        else:
            slope -= share
    tl.store(place, slope, mask=inside)


def softmax_slope(
    logits: torch.Tensor,
    reference: torch.Tensor,
    of_softmax: torch.Tensor,
    smoothing: torch.Tensor | None,
    class_weight: torch.Tensor | None,
) -> torch.Tensor:
    """Computes the ``softmax_slope`` of :mod:`tensorshard.loss.softmax_cross_entropy` on contiguous tensors."""
    rows, width = logits.shape
    _check_contiguous(logits, reference, of_softmax, smoothing, class_weight)
    if logits.numel():
        block = _block(width)
        with torch.cuda.device_of(logits):
            _softmax_slope[(rows, triton.cdiv(width, block))](
                logits, reference, of_softmax, smoothing, class_weight, width, BLOCK=block, num_warps=8
            )
    return logits


@triton.jit
def _round_to_bfloat16(numbers, bits, numel, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    number = tl.load(numbers + places, mask=inside, other=0) + tl.load(bits + places, mask=inside, other=0)
    tl.store(numbers + places, number & -65536, mask=inside)


def round_to_bfloat16_(tensor: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Computes :func:`rounding.round_to_bfloat16_`, equal to the last bit."""
    _check_contiguous(tensor, bits)
    if numel := tensor.numel():
        with torch.cuda.device_of(tensor):
            _round_to_bfloat16[(triton.cdiv(numel, 1024),)](tensor.view(torch.int32), bits, numel, BLOCK=1024)
    return tensor


@triton.jit
def _quantize(tensor, bits, codes, scales, blocks, size, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """A program for each `BLOCKS` of all blocks, of `size` numbers each."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, SIZE)
    inside = (block < blocks)[:, None] & (element < size)[None, :]
    places = block[:, None] * size + element[None, :]
    number = tl.load(tensor + places, mask=inside, other=0.0)
    # tl.max ignores NaN. A block with a NaN needs a scale of NaN, or it would look sound.
    broken = tl.max((number != number).to(tl.int32), 1) > 0  # noqa: PLR0124
    scale = tl.where(broken, float("nan"), tl.max(tl.abs(number), 1))
    tl.store(scales + block, scale, mask=block < blocks)
    # In units of the smallest level; 0 in a block of zeros, and in one of numbers so small that this overflows.
    units = (_LEVELS * _LEVELS) / tl.where(scale > 0.0, scale, 1.0)
    units = tl.where((scale > 0.0) & (units < float("inf")), units, 0.0)
    magnitude = tl.abs(number) * units[:, None]
    level = tl.floor(tl.sqrt(magnitude))
    up = (magnitude - level * level) / (level * 2.0 + 1.0) * 65536.0
    noise = tl.load(bits + places, mask=inside, other=0)
    level = tl.minimum(level + tl.where(noise.to(tl.float32) < up, 1.0, 0.0), 127.0)
    code = tl.where(number < 0.0, -level, level)
    tl.store(codes + places, code.to(tl.int8), mask=inside)


def quantize(
    tensor: torch.Tensor, bits: torch.Tensor, room: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Computes :func:`rounding.quantize`, and leaves `tensor` and `room` unchanged."""
    _check_contiguous(tensor, bits, codes, scales)
    if blocks := scales.numel():
        size = tensor.numel() // blocks
        together, padded = _blocks(size)
        with torch.cuda.device_of(tensor):
            _quantize[(triton.cdiv(blocks, together),)](
                tensor, bits, codes, scales, blocks, size, BLOCKS=together, SIZE=padded
            )


@triton.jit
def _dequantize(codes, scales, out, blocks, size, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """A program for each `BLOCKS` of all blocks, of `size` numbers each."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, SIZE)
    inside = (block < blocks)[:, None] & (element < size)[None, :]
    places = block[:, None] * size + element[None, :]
    code = tl.load(codes + places, mask=inside, other=0).to(tl.float32)
    unit = tl.load(scales + block, mask=block < blocks, other=0.0) / (_LEVELS * _LEVELS)
    tl.store(out + places, code * tl.abs(code) * unit[:, None], mask=inside)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Computes :func:`rounding.dequantize`."""
    _check_contiguous(codes, scales, out)
    if blocks := scales.numel():
        size = codes.numel() // blocks
        together, padded = _blocks(size)
        with torch.cuda.device_of(codes):
            _dequantize[(triton.cdiv(blocks, together),)](
                codes, scales, out, blocks, size, BLOCKS=together, SIZE=padded
            )
    return out


def _block(width: int) -> int:
    """How many elements of a row a program takes at a time."""
    return min(_WIDEST_BLOCK, triton.next_power_of_2(width))


def _blocks(size: int) -> tuple[int, int]:
    """How many blocks of 8-bit codes a program takes, and the power of two that one of them is padded to."""
    padded = triton.next_power_of_2(size)
    return max(1, 2048 // padded), padded


def _check_contiguous(*tensors: Any) -> None:
    """Refuses what these kernels would read past the end of, or in another order.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"a tensor {list(tensor.shape)} of strides {list(tensor.stride())} was given to a Triton kernel of the "
                "head, which takes contiguous ones: call .contiguous()"
            )
