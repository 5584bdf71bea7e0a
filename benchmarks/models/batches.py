"""Batches of random data, and losses of what comes out of a model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.models.case import Batch

VOCABULARY = 64
CLASSES = 5

Batches = Callable[[int, torch.Generator], Batch]


def tokens(
    name: str | None = None, *, length: int = 12, targets: str = "tokens", mask: bool = False, **others: int
) -> Batches:
    """Random tokens, and as targets the next "tokens", one of the "classes", or a "number" a sample.

    Args:
        name: of the model's argument; None for a positional one.
        mask: whether an ``attention_mask`` of ones goes with them.
        others: further arguments that are tokens, such as a decoder's, with their lengths.
    """

    def batch(samples: int, generator: torch.Generator) -> Batch:
        drawn = torch.randint(3, VOCABULARY, (samples, length + 1), generator=generator)
        inputs: Any = drawn[:, :-1]
        if name is not None:
            inputs = {name: inputs}
            for other, size in others.items():
                inputs[other] = torch.randint(3, VOCABULARY, (samples, size), generator=generator)
            if mask:
                inputs["attention_mask"] = torch.ones(samples, length, dtype=torch.long)
        if targets == "tokens":
            size = next(reversed(others.values()), length)
            return inputs, torch.randint(0, VOCABULARY, (samples, size), generator=generator)
        return inputs, _targets(targets, samples, generator)

    return batch


def images(name: str | None = None, *, size: int = 32, channels: int = 3, targets: str = "classes") -> Batches:
    """Random images, and as targets one of the "classes", or a "number" a sample."""
    return numbers(channels, size, size, name=name, targets=targets)


def numbers(*shape: int, name: str | None = None, targets: str = "number") -> Batches:
    """Normally distributed numbers of `shape` a sample."""
    return several({name or "": shape}, targets=targets, positional=name is None)


def several(
    shapes: dict[str, Sequence[int]],
    *,
    indices: dict[str, tuple[Sequence[int], int]] | None = None,
    targets: str = "number",
    positional: bool = False,
) -> Batches:
    """Several arguments.

    Args:
        shapes: of normally distributed ones, by name.
        indices: shapes of integers and how many values there are, by name.
        positional: whether they are passed in this order, not by name.
    """

    def batch(samples: int, generator: torch.Generator) -> Batch:
        inputs: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            inputs[name] = torch.randn(samples, *shape, generator=generator)
        for name, (shape, count) in (indices or {}).items():
            inputs[name] = torch.randint(0, count, (samples, *shape), generator=generator)
        target_values = _targets(targets, samples, generator)
        if not positional:
            return inputs, target_values
        values = tuple(inputs.values())
        return (values[0] if len(values) == 1 else values), target_values

    return batch


def _targets(kind: str, samples: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "classes":
        return torch.randint(0, CLASSES, (samples,), generator=generator)
    return torch.randn(samples, generator=generator)


def main_output(output: Any) -> torch.Tensor:
    """The tensor that a loss is taken of: logits if it has any, else the first floating-point tensor."""
    if isinstance(output, torch.Tensor):
        return output
    if getattr(output, "logits", None) is not None:
        return output.logits
    values = output.values() if isinstance(output, dict) else output
    return next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def token_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every token's logits [samples, tokens, classes]."""
    logits = main_output(output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def class_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits [samples, classes]."""
    return nn.functional.cross_entropy(main_output(output), targets)


def number_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Mean square of the distance of every number of a sample from the sample's target."""
    prediction = main_output(output)
    return (prediction - targets.to(prediction.dtype).view(-1, *[1] * (prediction.ndim - 1))).square().mean()


def all_numbers_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """The sum of :func:`number_loss` over all floating-point tensors of the output, those with a gradient."""
    if isinstance(output, torch.Tensor):
        return number_loss(output, targets)
    values = output.values() if isinstance(output, dict) else output
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad]
    return torch.stack([number_loss(value, targets) for value in tensors]).sum()
