"""What checks by numbers share: values, gradients, and comparison."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
"""What code raises that is called in a way that it does not expect."""

_TOLERANCE = 1e-4
_LARGE = 1 << 22  # elements; larger parameters are checked with values that repeat, and without their own gradients


def check_equal_parts(name: str, module: nn.Module, experts: int, ranks: int) -> None:
    """Refuses experts of which ranks would have different numbers.

    Raises:
        ValueError: `experts` are no multiple of `ranks`.
    """
    if experts % ranks:
        ways = [str(n) for n in range(2, experts + 1) if experts % n == 0]
        raise ValueError(
            f"ep={ranks} was given, but the experts of {name!r} ({type(module).__name__}) cannot be split over {ranks} "
            f"ranks: there are {experts}, which are not equal parts; ep can be {', '.join(ways)}"
        )


def random_values(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Values of a parameter on the meta device; large ones repeat and take no memory."""
    fan_in = parameter.shape[-1] if parameter.dim() else 1
    if parameter.numel() <= _LARGE:
        values = torch.randn(parameter.shape, generator=random) / math.sqrt(fan_in)
        return values.requires_grad_()
    kept = max(1, parameter.dim() - 1)
    rows = torch.randn(*parameter.shape[:kept], *(1 for _ in parameter.shape[kept:]), generator=random)
    return (rows / fan_in).expand(parameter.shape)


def gradients_of(output: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients by `leaves` of a sum of the elements of `output`, each with another weight."""
    upstream = torch.linspace(-1, 1, output.numel()).view(output.shape).cos()
    return list(torch.autograd.grad(output, list(leaves), upstream, allow_unused=True, materialize_grads=True))


def first_difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> int | None:
    """The index of the first of `results` that is not as `expected`; None if all are."""
    for index, (one, other) in enumerate(zip(results, expected, strict=True)):
        scale = max(1e-3, other.abs().max().item()) if other.numel() else 1.0
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale):
            return index
    return None


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within this, `module` is in evaluation mode."""
    modes = {inner: inner.training for inner in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for inner, training in modes.items():
            inner.training = training
