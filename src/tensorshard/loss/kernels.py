"""The operations on a tile between the matrix products, plain or compiled: softmax, and rounding to few bits.

Each operation here reads and writes a whole tile. On a CPU, whose cache holds the tile, that is cheap. On a GPU it
would take most of the time, so there torch.compile makes one or two kernels of each function. Both are the same code,
so tests without a GPU check what runs on one.
"""

import functools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from tensorshard.loss.formulas import cap, cap_slope, softmax_slope
from tensorshard.torch_private.dispatch import has_dispatch_mode

logger = logging.getLogger("tensorshard")

_BLOCK = 128
_SMALLEST_BLOCK = 32
_LEVELS = 127


def online_softmax(logits: torch.Tensor, reference: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Adds a tile to the running sums of exponentials (Milakov and Gimelshein 2018).

    Args:
        logits: [N, width]; becomes exp(logits - the new reference).
        reference: [N]: the largest logit so far.
        total: [N] fp64: the sum of exp(logits - reference) so far; updated in place.

    Returns:
        The new reference.
    """
    after = torch.maximum(reference, logits.amax(1))
    logits.sub_(after[:, None]).exp_()
    total.mul_((reference - after).double().exp_()).add_(logits.sum(1))
    return after


class Noise:
    """Random bits for the rounding of one step's tiles, the same for the same seed and step.

    They are drawn once a step, and each use begins at another place in them. Rounding needs new numbers for an element
    at each step. They need not be independent of other elements' numbers.

    Args:
        numel: the most elements that one use takes.
        seed: of the draws.
    """

    _PLACES = 1 << 16

    def __init__(self, numel: int, seed: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        bits = torch.empty(numel + self._PLACES, dtype=torch.int32, device=device)
        self._bits = bits.random_(0, 1 << 16, generator=generator)
        self._places = random.Random(seed)

    def bits(self, shape: torch.Size) -> torch.Tensor:
        """16 random bits an element."""
        place = self._places.randrange(self._PLACES)
        return self._bits[place : place + shape.numel()].view(shape)


def round_to_bfloat16_(tensor: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 numbers to one of their two neighbours in bf16, the nearer one more often, so that the mean is kept.

    Without it an update smaller than a 512th of a weight would be lost each time. (Used for training in bf16 by
    Zamirai et al. 2020.)

    Args:
        tensor: contiguous; changed in place, and still fp32.
        bits: of its shape: 16 random bits an element, as :class:`Noise` gives them.
    """
    tensor.view(torch.int32).add_(bits).bitwise_and_(-(1 << 16))
    return tensor


def block_size(features: int) -> int:
    """How many elements of a row share a scale: up to 128; a whole row if it does not divide into such blocks."""
    size = next(size for size in range(min(_BLOCK, features), 0, -1) if features % size == 0)
    return size if size >= _SMALLEST_BLOCK else features


def quantize(
    tensor: torch.Tensor, bits: torch.Tensor, room: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """fp32 rows as 8-bit codes: code c of a block of scale s stands for s * c * |c| / 127^2.

    Squares put the levels close together near zero, where most of a momentum is; a block's scale is its largest
    magnitude (block-wise quantisation of optimizer states: Dettmers et al. 2022). Rounded stochastically, the mean is
    kept exactly.

    Args:
        tensor: [rows, D], contiguous; overwritten.
        bits: of its shape: 16 random bits an element.
        room: of the same shape, overwritten.
        codes: [rows, D] int8; written.
        scales: [rows, D / block] fp32; written.
    """
    blocks = tensor.view(*scales.shape, -1)
    scales.copy_(torch.linalg.vector_norm(blocks, torch.inf, dim=-1))
    magnitude = torch.abs(blocks, out=room.view(blocks.shape))
    magnitude.mul_((_LEVELS * _LEVELS / scales).nan_to_num_(posinf=0.0)[..., None])  # in units of the smallest level
    level = magnitude.sqrt().floor_()
    # Between the levels k^2 and (k + 1)^2, which are 2k + 1 apart: it rounds up with the probability that keeps the
    # mean.
    up = magnitude.addcmul_(level, level, value=-1).div_(level * 2 + 1).mul_(1 << 16)
    level += bits.view(level.shape) < up
    codes.copy_(torch.copysign(level.clamp_(max=_LEVELS), blocks, out=level).view(tensor.shape))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The fp32 rows that 8-bit codes stand for, written to `out`."""
    blocks = out.copy_(codes).view(*scales.shape, -1)
    blocks.mul_(blocks.abs()).mul_((scales / (_LEVELS * _LEVELS))[..., None])
    return out


@dataclass(frozen=True)
class Kernels:
    """The operations on a tile, of this module and :mod:`tensorshard.loss.formulas`: as plain PyTorch, or compiled."""

    online_softmax: Callable[..., torch.Tensor]
    softmax_slope: Callable[..., torch.Tensor]
    cap: Callable[..., torch.Tensor]
    cap_slope: Callable[..., torch.Tensor]
    round_to_bfloat16_: Callable[..., torch.Tensor]
    quantize: Callable[..., None]
    dequantize: Callable[..., torch.Tensor]


REFERENCE = Kernels(online_softmax, softmax_slope, cap, cap_slope, round_to_bfloat16_, quantize, dequantize)


@functools.cache
def compiled_kernels(backend: str = "inductor") -> Kernels:
    """All kernels compiled, for tiles of any size. None takes a number that changes, since each would be compiled
    anew."""
    functions = vars(REFERENCE).items()
    return Kernels(**{name: torch.compile(function, backend=backend, dynamic=True) for name, function in functions})


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether torch.compile makes kernels for `device` on this machine. Tries it once a process, in some seconds.

    Triton compiles a C file for the driver, so it needs a C compiler and Python's headers, which images for inference
    leave out.
    """
    try:
        values = [torch.zeros(shape, device=device) for shape in ((2, 32), (2,), (2,))]
        compiled_kernels().online_softmax(*values[:2], values[2].double())
    except Exception as error:
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        logger.warning(
            "torch.compile makes no kernels here, so losses over many classes are computed by plain operations, which "
            "are slower; it needs Triton, a C compiler and Python's headers: %s",
            cause,
        )
        return False
    return True


def choose_kernels(tensor: torch.Tensor) -> Kernels:
    """On a GPU the compiled kernels, if Triton is installed, to which torch.compile translates them, and works.

    On CPUs, and where a mode watches or fakes operations, plain PyTorch.
    """
    real = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if tensor.device.type != "cuda" or not real or has_dispatch_mode() or find_spec("triton") is None:
        return REFERENCE
    return compiled_kernels() if can_compile(tensor.device) else REFERENCE
