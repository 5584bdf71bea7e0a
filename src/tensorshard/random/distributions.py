"""What torch's random operators return, made of random words: a table of operators at the end.

`Words` are 32 random bits for each element of a shape. A second set for the same draw is asked for where an element
needs more bits.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Digits of a fraction below 1 in each type.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}


class Words(Protocol):
    """One draw."""

    def __call__(self, tensor: torch.Tensor, again: int = 0) -> torch.Tensor:
        """32 bits, as int32, for each element of a tensor like `tensor`; independent ones for another `again`."""


def _uniform(bits: torch.Tensor, dtype: torch.dtype = torch.float32, *, above_zero: bool = False) -> torch.Tensor:
    """In [0, 1), or (0, 1] for logarithms. 16-bit types get as many bits as they hold, so that none becomes 1."""
    digits = _DIGITS.get(dtype, 24)
    whole = (bits >> (32 - digits)) & ((1 << digits) - 1)
    return (whole + int(above_zero)).to(_wide(dtype)) * 2.0**-digits


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _are_below(bits: torch.Tensor, p: float) -> torch.Tensor:
    """True with probability `p`, to 32 bits."""
    limit = int(p * 2**32) - 2**31
    return bits < limit if limit < 2**31 else torch.ones_like(bits, dtype=torch.bool)


def _normal(words: Words, tensor: torch.Tensor) -> torch.Tensor:
    """Box and Muller's, with a pair of words for each element."""
    wide = _wide(tensor.dtype)
    radius = torch.sqrt(-2 * torch.log(_uniform(words(tensor), wide, above_zero=True)))
    return radius * torch.cos(2 * math.pi * _uniform(words(tensor, 1), wide))


def _exponential(words: Words, tensor: torch.Tensor, rate: float) -> torch.Tensor:
    return -torch.log(_uniform(words(tensor), _wide(tensor.dtype), above_zero=True)) / rate


def _integers(words: Words, tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    bits, more = words(tensor).to(torch.int64), words(tensor, 1).to(torch.int64)
    return low + ((bits & 0xFFFFFFFF) | ((more & 0x7FFFFFFF) << 32)) % (high - low)


def _end(tensor: torch.Tensor) -> int:
    """The integers that ``random_()`` draws are below it."""
    if tensor.is_floating_point():
        return 2 ** {torch.float64: 53}.get(tensor.dtype, _DIGITS.get(tensor.dtype, 24)) + 1
    return 2 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def _dropout(words: Words, input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = _are_below(words(input), 1 - p)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _rrelu(
    words: Words,
    input: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
) -> torch.Tensor:
    slope = torch.where(input <= 0, lower + (upper - lower) * _uniform(words(input)), 1.0).to(input.dtype)
    noise.copy_(slope)
    return input * slope


def _multinomial(words: Words, weights: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
    rows = weights.reshape(-1, weights.shape[-1]).float()
    if not replacement or num_samples == 1:  # the first arrivals of exponential clocks
        chosen = (rows / _exponential(words, weights, 1.0).reshape(rows.shape)).topk(num_samples, -1).indices
    else:
        asked = torch.empty((*weights.shape[:-1], num_samples), device=rows.device)
        level = _uniform(words(asked)).reshape(-1, num_samples) * rows.sum(-1, keepdim=True)
        chosen = torch.searchsorted(rows.cumsum(-1), level, right=True).clamp_(max=rows.shape[-1] - 1)
    return chosen.reshape(*weights.shape[:-1], num_samples)


def _randperm(words: Words, n: int, *, out: torch.Tensor) -> torch.Tensor:
    return out.resize_(n).copy_(_integers(words, torch.empty(n, device=out.device), 0, 2**62).argsort())


def _filling(values: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The kernel of an operator that fills a tensor with ``values(words, tensor, ...)``."""

    def fill(words: Words, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.copy_(values(words, self, *args, **kwargs))

    return fill


DRAWN: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _filling(lambda words, self, p=0.5: _are_below(words(self), p)),
    "bernoulli_.Tensor": _filling(lambda words, self, p: _uniform(words(self)).to(p.dtype) < p),
    "bernoulli.out": lambda words, self, *, out: out.resize_(self.shape).copy_(_uniform(words(self)) < self),
    "uniform_": _filling(lambda words, self, low=0.0, high=1.0: low + (high - low) * _uniform(words(self), self.dtype)),
    "normal_": _filling(lambda words, self, mean=0.0, std=1.0: mean + std * _normal(words, self)),
    "normal.Tensor_float": lambda words, mean, std=1.0: mean + std * _normal(words, mean).to(mean.dtype),
    "normal.float_Tensor": lambda words, mean, std: mean + std * _normal(words, std).to(std.dtype),
    "normal.Tensor_Tensor": lambda words, mean, std: mean + std * _normal(words, mean + std).to(mean.dtype),
    "exponential_": _filling(lambda words, self, lambd=1.0: _exponential(words, self, lambd)),
    "log_normal_": _filling(lambda words, self, mean=1.0, std=2.0: (mean + std * _normal(words, self)).exp()),
    "cauchy_": _filling(
        lambda words, self, median=0.0, sigma=1.0: (
            median + sigma * torch.tan(math.pi * (_uniform(words(self), _wide(self.dtype), above_zero=True) - 0.5))
        )
    ),
    "geometric_": _filling(lambda words, self, p: torch.ceil(_exponential(words, self, 1.0) / -math.log1p(-p))),
    "random_": _filling(lambda words, self: _integers(words, self, 0, _end(self))),
    "random_.to": _filling(lambda words, self, to: _integers(words, self, 0, to)),
    "random_.from": _filling(
        lambda words, self, low, to: _integers(words, self, low, _end(self) if to is None else to)
    ),
    "randperm.generator_out": _randperm,
    "multinomial": _multinomial,
    "native_dropout": _dropout,
    "rrelu_with_noise": _rrelu,
}
"""By the operator's name: called with the words, and the operator's arguments without the generator."""

REFUSED = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
"""These take as many words as it happens to need."""

REFUSED_ON_CUDA = (
    "_cudnn_rnn",
    "_fused_dropout",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""These draw inside of a kernel of torch's, if they have dropout."""
