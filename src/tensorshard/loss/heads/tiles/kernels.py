"""The operations on a tile of logits between the matrix products, as plain PyTorch or compiled.

Each operation here reads and writes a whole tile. On a CPU, whose cache holds the tile, that is cheap. On a GPU it
would take most of the time, so there torch.compile makes one or two kernels of each function. Both are the same code,
so tests without a GPU check what runs on one.

There are also kernels written in Triton (:mod:`triton_kernels`). They are tested in Triton's interpreter. Which ones
are faster on a GPU has not been measured, so they are not the default. For tensors on a GPU, the environment variable
``TENSORSHARD_HEAD_KERNELS`` (compiled, triton or reference) chooses. It is not a public option: the benchmark ``gpu``
sets it to measure both side by side.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from tensorshard.loss.heads.tiles.rounding import dequantize, quantize, round_to_bfloat16_
from tensorshard.loss.softmax_cross_entropy import cap, cap_slope, softmax_slope
from tensorshard.torch_private.dispatch import has_dispatch_mode

KERNELS_VARIABLE = "TENSORSHARD_HEAD_KERNELS"


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
    plain PyTorch, compiled, or written in Triton.
    """

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
def triton_kernels() -> Kernels:
    """The kernels written in Triton, and the others compiled.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise RuntimeError(
            f"{KERNELS_VARIABLE}=triton was given, but Triton is not installed: pip install triton, or unset it"
        )
    from tensorshard.loss.heads.tiles import triton_kernels as written

    names = [name for name in vars(REFERENCE) if hasattr(written, name)]
    return replace(compiled_kernels(), **{name: getattr(written, name) for name in names})


def choose_kernels(tensor: torch.Tensor) -> Kernels:
    """On a GPU the compiled kernels, if Triton is installed, or those that ``TENSORSHARD_HEAD_KERNELS`` names.

    On CPUs, and where a mode watches or fakes operations, plain PyTorch.

    Raises:
        ValueError: the variable names no kernels.
        RuntimeError: it names kernels that need Triton, which is not installed.
    """
    real = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if tensor.device.type != "cuda" or not real or has_dispatch_mode():
        return REFERENCE
    match os.environ.get(KERNELS_VARIABLE, "compiled"):
        case "compiled":
            return REFERENCE if find_spec("triton") is None else compiled_kernels()
        case "triton":
            return triton_kernels()
        case "reference":
            return REFERENCE
        case unknown:
            raise ValueError(f"{KERNELS_VARIABLE}={unknown} was given: use compiled, triton or reference")
