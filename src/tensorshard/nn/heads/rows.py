"""Initial values of some rows of a layer, as the whole layer would get them, without the whole layer."""

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

    All rows are drawn, in order, from the default generator of the CPU, whatever the device, and those of other ranks
    dropped: what a head begins with does not depend on how it is split, nor on where it lives.

    Returns:
        The weight [count, features], and the bias [count] or None.
    """
    limit = 1 / math.sqrt(features) if features else 0.0
    weight = torch.empty((count, features), device=device, dtype=dtype)
    _draw(weight, classes, start, limit)
    if not bias:
        return weight, None
    biases = torch.empty((count, 1), device=device, dtype=dtype)
    _draw(biases, classes, start, limit)
    return weight, biases.view(count)


@torch.no_grad()
def _draw(rows: torch.Tensor, whole: int, start: int, limit: float) -> None:
    """Fills `rows` with rows [start, ...) of `whole`, uniform in [-limit, limit)."""
    if rows.is_meta:
        return
    step = max(1, _CHUNK // max(1, rows.size(1)))
    for begin in range(0, whole, step):
        end = min(whole, begin + step)
        drawn = torch.empty((end - begin, rows.size(1)), dtype=rows.dtype, device="cpu").uniform_(-limit, limit)
        first, last = max(begin, start), min(end, start + len(rows))
        if first < last:
            rows[first - start : last - start] = drawn[first - begin : last - begin]
