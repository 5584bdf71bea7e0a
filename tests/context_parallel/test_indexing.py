"""Random reads, writes and reshapes, on tensors that are cut along any dimension."""

import random
from typing import Any

import pytest
import torch
from simulated_ranks import simulate

from tensorshard.context_parallel import contiguous, cut, from_positions, whole


def _random_index(shape: list[int], rng: random.Random, only_basic: bool) -> Any:
    kinds = ["full", "slice", "int", "none"] + ([] if only_basic else ["long", "bool", "list", "mask"])
    index: list[Any] = []
    dim, last = 0, rng.randint(0, len(shape))
    while dim < last:
        length, kind = shape[dim], rng.choice(kinds)
        if kind == "none":
            index.append(None)
            kinds.remove("none")
            continue
        if kind == "mask":
            if dim + 1 < len(shape):
                index.append(torch.rand(length, shape[dim + 1]) < 0.6)
                dim += 2
            continue
        index.append(_entry(kind, length, rng))
        dim += 1
    if rng.random() < 0.3:
        index.append(Ellipsis)
    return tuple(index) if len(index) != 1 or rng.random() < 0.5 else index[0]


def _entry(kind: str, length: int, rng: random.Random) -> Any:
    if kind == "full":
        return slice(None)
    if kind == "int":
        return rng.randrange(-length, length)
    if kind == "long":
        return torch.randint(-length, length, (rng.choice([1, 3, length, 2 * length]),))
    if kind == "list":
        return [rng.randrange(length) for _ in range(rng.choice([1, 2]))]
    if kind == "bool":
        return torch.rand(length) < 0.6
    start, stop = sorted(rng.sample(range(length + 1), 2))
    starts = [start, start - length if start else None, None]
    stops = [stop, None, stop - length if stop < length else None]
    return slice(rng.choice(starts), rng.choice(stops), rng.choice([None, None, 1, 2]))


def _random_shape(count: int, rng: random.Random) -> list[int]:
    new = []
    while count > 1 and len(new) < 4:
        new.append(rng.choice([k for k in range(1, count + 1) if count % k == 0]))
        count //= new[-1]
    new.append(count)
    rng.shuffle(new)
    return new


def _written(y: torch.Tensor, index: Any, value: torch.Tensor, kind: str, is_cut: bool) -> torch.Tensor:
    out = y * 2
    if kind == "number":
        out[index] = 3.0
    elif kind == "row":
        out[index] = value[(0,) * (value.ndim - 1)] if value.ndim else value
    elif kind == "cut" and is_cut and value.ndim and max(value.shape) >= 4:
        out[index] = cut(value, max(range(value.ndim), key=lambda dim: value.shape[dim]))
    else:
        out[index] = value
    return out


def _check_case(seed: int) -> bool:
    """One random case; False if torch itself refuses it."""
    rng = random.Random(seed)
    shape = [rng.choice([2, 4, 5, 8, 9, 12]) for _ in range(rng.choice([2, 3, 4]))]
    dim = rng.randrange(len(shape))
    length = shape[dim]
    if length < 4:
        return False
    size = rng.choice([2, 3]) if length >= 6 else 2
    torch.manual_seed(seed)
    x, what = torch.randn(shape, dtype=torch.float64), rng.choice(["read", "read", "write", "write", "reshape"])
    index = _random_index(shape, rng, what == "write" and rng.random() < 0.7)
    new = _random_shape(x.numel(), rng)
    try:
        value = torch.randn_like(x[index]) if what != "reshape" else torch.zeros(1, dtype=torch.float64)
    except IndexError:
        return False
    if what == "write" and not value.numel():
        return False
    kind = rng.choice(["number", "tensor", "cut", "row"])
    layout = contiguous(length, size)
    if rng.random() < 0.5:
        layout = from_positions([part.numpy() for part in torch.randperm(length).tensor_split(size)])

    def run(ranks: int) -> list[torch.Tensor]:
        given, written = x.clone().requires_grad_(), value.clone().requires_grad_()
        y = cut(given, dim, layout) if ranks > 1 else given
        if what == "read":
            out = y[index]
        elif what == "reshape":
            out = y.reshape(new)
        else:
            out = _written(y, index, written, kind, ranks > 1)
        out = whole(out * 1.0)
        weights = torch.rand(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        ((out * weights).sum() / ranks).backward()
        return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in (given, written))]

    expected = run(1)

    def on_rank(group: Any) -> list[torch.Tensor]:
        with group.active():
            return run(size)

    about = (
        f"seed {seed}: {what} {shape} cut along {dim} on {size} ranks, {index if what != 'reshape' else new}, {kind}"
    )
    try:
        results = simulate(size, on_rank)
    except RuntimeError as error:
        raise AssertionError(about) from error
    for result in results:
        assert result[0].shape == expected[0].shape and torch.allclose(result[0], expected[0]), about
    for i in (1, 2):
        total = sum(result[i] for result in results)
        assert torch.allclose(total, expected[i]), f"gradient {i}, {about}"
    return True


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(60, 5000, 247))])
def test_reads_writes_and_reshapes_are_those_of_the_whole_tensor(first):
    count = 60 if first == 0 else 247
    assert sum(_check_case(seed) for seed in range(first, first + count)) > count // 3
