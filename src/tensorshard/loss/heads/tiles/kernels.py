"""The operations on a tile of logits between the matrix products, as plain PyTorch or compiled.

Each operation here reads and writes a whole tile. On a CPU, whose cache holds the tile, that is cheap. On a GPU it
would take most of the time, so there torch.compile makes one or two kernels of each function. Both are the same code,
so tests without a GPU check what runs on one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from tensorshard.loss.heads.tiles.rounding import dequantize, quantize, round_to_bfloat16_
from tensorshard.loss.softmax_cross_entropy import cap, cap_slope, softmax_slope
from tensorshard.torch_private.dispatch import has_dispatch_mode


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


@dataclass(frozen=True)
class Kernels:
    """The operations on a tile of this module, :mod:`tensorshard.loss.softmax_cross_entropy` and :mod:`rounding`: as
    plain PyTorch, or compiled."""

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


def choose_kernels(tensor: torch.Tensor) -> Kernels:
    """On a GPU the compiled kernels, if Triton is installed, to which torch.compile translates them.

    On CPUs, and where a mode watches or fakes operations, plain PyTorch.
    """
    real = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if tensor.device.type != "cuda" or not real or has_dispatch_mode() or find_spec("triton") is None:
        return REFERENCE
    return compiled_kernels()
