"""The initial values of some rows of a layer, without building the whole layer."""

import math

import torch

_CHUNK = 1 << 22  # numbers drawn at a time


def initial_rows(
    features: int,
    classes: int,
    start: int,
    count: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [start, start + count) of what ``nn.Linear(features, classes, bias)`` gets from the same random seed.

    All rows are drawn in order from the default generator of the CPU, for any device, and those of other ranks are
    dropped. So a head's initial values do not depend on how it is split, nor on its device.

    Returns:
        The weight [count, features], and the bias [count] or None.
    """
    weight = torch.empty((count, features), device=device, dtype=dtype)
    fill_rows(weight, classes, start, features)
    if not bias:
        return weight, None
    biases = torch.empty(count, device=device, dtype=dtype)
    fill_rows(biases, classes, start, features)
    return weight, biases


@torch.no_grad()
def fill_rows(rows: torch.Tensor, classes: int, start: int, features: int) -> None:
    """Fills `rows`, a weight's or a bias's, with rows [start, ...) of what a layer of all `classes` gets."""
    if rows.is_meta:
        return
    limit = 1 / math.sqrt(features) if features else 0.0
    width = 1 if rows.ndim == 1 else rows.size(1)
    flat = rows.view(len(rows), width)
    step = max(1, _CHUNK // max(1, width))
    for begin in range(0, classes, step):
        end = min(classes, begin + step)
        drawn = torch.empty((end - begin, width), dtype=rows.dtype, device="cpu").uniform_(-limit, limit)
        first, last = max(begin, start), min(end, start + len(rows))
        if first < last:
            flat[first - start : last - start] = drawn[first - begin : last - begin]
