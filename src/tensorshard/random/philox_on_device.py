"""The words of :mod:`tensorshard.random.philox`, computed by torch on the device that needs them.

A GPU gets one kernel, which ``torch.compile`` makes of the arithmetic below. Where it cannot, the operators run one by
one. torch has no unsigned integers of 64 bits, so products are made of halves.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch

_BLOCK = 8  # words
_LOW = 0xFFFF_FFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def _signed(number: int) -> int:
    """The int64 with the same bits as an unsigned number of 64 bits."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _high_of_product(a: torch.Tensor, b: int) -> torch.Tensor:
    """The upper 64 of the 128 bits of ``a * b``, both taken as unsigned."""
    low, high = a & _LOW, (a >> 32) & _LOW
    b_low, b_high = b & _LOW, b >> 32
    carry = ((low * b_low) >> 32) & _LOW
    middle = high * b_low + carry
    other = low * b_high + (middle & _LOW)
    return high * b_high + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW)


def _blocks(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox 4x64-10 of blocks: int64 of shape [..., 4] for `counter` of shape [...] and a `key` of shape [2]."""
    c0, c1, c2, c3 = counter, torch.zeros_like(counter), torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key[0], key[1]
    for _ in range(_ROUNDS):
        high0, low0 = _high_of_product(c0, _MULTIPLIERS[0]), c0 * _signed(_MULTIPLIERS[0])
        high1, low1 = _high_of_product(c2, _MULTIPLIERS[1]), c2 * _signed(_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(_WEYL[0]), k1 + _signed(_WEYL[1])
    return torch.stack((c0, c1, c2, c3), -1)


@cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    compiled = torch.compile(_blocks, dynamic=True)

    def call(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        nonlocal compiled
        try:
            return compiled(counter, key)
        except Exception as error:
            if compiled is _blocks:
                raise
            compiled = _blocks
            warnings.warn(
                f"torch.compile could not make a kernel for random numbers, so each dropout launches some 400 "
                f"({error}): install Triton, or set Plan(random='by_rank')",
                stacklevel=2,
            )
            return _blocks(counter, key)

    return call


def words_on_device(
    key: int, whole: Sequence[int], offset: Sequence[int], size: Sequence[int], device: torch.device
) -> torch.Tensor:
    """As :func:`tensorshard.random.philox.words_of_box`, for boxes with elements."""
    padded = [*whole[:-1], -(-whole[-1] // _BLOCK) * _BLOCK if len(whole) > 1 else whole[-1]]
    strides = [math.prod(padded[place + 1 :]) // _BLOCK for place in range(len(padded) - 1)]
    first, last = offset[-1] // _BLOCK, -(-(offset[-1] + size[-1]) // _BLOCK)
    counter = torch.arange(first + 1, last + 1, device=device)  # the generator counts before it draws
    for place in reversed(range(len(size) - 1)):
        rows = torch.arange(offset[place], offset[place] + size[place], device=device) * strides[place]
        counter = rows.view(-1, *[1] * counter.dim()) + counter
    halves = torch.tensor([_signed(key), _signed(key >> 64)], device=device)
    blocks = _compiled()(counter, halves) if device.type == "cuda" else _blocks(counter, halves)
    begin = offset[-1] - first * _BLOCK
    return blocks.view(torch.int32).flatten(-2)[..., begin : begin + size[-1]]
