"""What differs between a run in one process and the same run on ranks, and by how much more than rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tensorshard.verify.record import Record, Step, Tensors

_ULPS = 64  # units in the last place of the largest number, which a sum in another order may differ by
_NOISE = 30  # times what a change of all initial weights in their last place makes of it

# Of the largest number: how far two computations of it may be apart, beside the above.
_RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 4e-2}

KINDS = {
    "initial weight": "initial weights",
    "loss": "losses",
    "gradient": "gradients before clipping",
    "norm": "gradient norms",
    "weight": "weights after each step",
    "buffer": "buffers after each step",
    "state": "optimizer states after each step",
    "other": "evaluation and generation",
}
"""What is compared, and its name in tables, in the order in which a step makes it."""


@dataclass(frozen=True)
class Difference:
    """One tensor or number that is not what one process has.

    Attributes:
        step: its number; -1 for the initial weights.
        kind: one of :data:`KINDS`.
        name: of the parameter, buffer or state; "" for a loss or a norm.
        rank: where it is.
        error: the largest distance of an element.
        scale: the largest number that it is compared with: of a weight, how far the reference has moved it.
        allowed: the distance that rounding may make.
    """

    step: int
    kind: str
    name: str
    rank: int
    error: float
    scale: float
    allowed: float

    @property
    def excess(self) -> float:
        """How many times the allowed distance it is."""
        return self.error / self.allowed if self.allowed else float("inf")


@dataclass
class Comparison:
    """All that was compared.

    Attributes:
        counts: how many tensors or numbers of each kind.
        largest: of each kind, the largest part of its allowed distance that was used.
        differences: those that used more, in the order in which a run makes them.
    """

    counts: dict[str, int]
    largest: dict[str, float]
    differences: list[Difference]


def compare(
    reference: Record, disturbed: Record | None, ranks: Sequence[Record], relative: float | None, noise: float = _NOISE
) -> Comparison:
    """Compares each rank's record with the reference.

    Args:
        disturbed: the reference once more, from weights changed in their last place: how much rounding grows. A tensor
            may differ by a multiple of what it differs there.
        relative: in place of the relative tolerance of the reference's dtypes.
        noise: that multiple.
    """
    _check_names(reference, ranks)
    return joined([compare_rank(reference, disturbed, one, i, relative, noise) for i, one in enumerate(ranks)])


def _check_names(reference: Record, ranks: Sequence[Record]) -> None:
    nowhere = [name for name in reference.initial if not any(name in record.initial for record in ranks)]
    if nowhere:
        there = sorted({name for record in ranks for name in record.initial} - reference.initial.keys())
        raise ValueError(
            f"no rank has the parameter {nowhere[0]!r} of the reference ({len(nowhere)} of {len(reference.initial)} "
            f"are missing); the ranks have {', '.join(map(repr, there[:3])) or 'no others'}: pass rename=, a function "
            f"that makes the reference's name of a rank's name"
        )


def compare_rank(
    reference: Record,
    disturbed: Record | None,
    record: Record,
    rank: int,
    relative: float | None,
    noise: float = _NOISE,
) -> Comparison:
    """Compares one rank's record with the reference; arguments as for :func:`compare`."""
    comparison = Comparison(dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), [])
    for one in _differences(reference, disturbed, record, rank, relative, noise):
        comparison.counts[one.kind] += 1
        comparison.largest[one.kind] = max(comparison.largest[one.kind], one.excess if one.error else 0.0)
        if one.error > one.allowed or one.error != one.error:
            comparison.differences.append(one)
    return comparison


def joined(comparisons: Sequence[Comparison]) -> Comparison:
    """What was compared on several ranks."""
    overall = Comparison(dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), [])
    for one in comparisons:
        for kind in KINDS:
            overall.counts[kind] += one.counts[kind]
            overall.largest[kind] = max(overall.largest[kind], one.largest[kind])
        overall.differences += one.differences
    order = list(KINDS)
    overall.differences.sort(key=lambda one: (one.step, order.index(one.kind)))
    return overall


def allowed(
    expected: torch.Tensor, scale: float, noise: float, relative: float | None = None, factor: float = _NOISE
) -> float:
    """How far a tensor may be from `expected`, whose changes have the size of `scale`."""
    dtype = expected.dtype if expected.is_floating_point() else torch.float32
    largest = float(expected.double().abs().max()) if expected.numel() else 0.0
    share = _RELATIVE.get(dtype, 2e-5) if relative is None else relative
    return share * scale + _ULPS * torch.finfo(dtype).eps * largest * 1e-1 + factor * noise


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest distance of two elements; infinite for other shapes or where one alone is not finite."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs())
    return float("inf") if not bool(apart.isfinite().all()) else float(apart.max())


def _differences(
    reference: Record,
    disturbed: Record | None,
    record: Record,
    rank: int,
    relative: float | None,
    factor: float,
) -> Iterator[Difference]:
    def between(
        kind: str, expected: Tensors, actual: Tensors, twin: Tensors | None, base: Tensors
    ) -> Iterator[Difference]:
        for name, value in expected.items():
            start = base.get(name)
            moved = value.double()  # masks, too
            if start is not None and start.shape == value.shape:
                moved = moved - start.double()
            scale = float(moved.abs().max()) if moved.numel() else 0.0
            noise = 0.0 if twin is None or name not in twin else distance(value, twin[name])
            limit = allowed(value, scale, 0.0 if noise == float("inf") else noise, relative, factor)
            if name not in actual:
                if kind != "gradient" or name not in record.initial:  # a rank has what its stage has
                    continue
                error = scale  # no gradient is as good as zeros
            else:
                error = distance(value, actual[name])
            yield Difference(step, kind, name, rank, error, scale, limit)

    def numbers(kind: str, expected: float | None, actual: float | None, twin: float | None) -> Iterator[Difference]:
        if expected is None or actual is None:
            return
        a, b = torch.tensor(expected, dtype=torch.float64), torch.tensor(actual, dtype=torch.float64)
        noise = 0.0 if twin is None else abs(twin - expected)
        dtype = next((one.dtype for one in reference.initial.values() if one.is_floating_point()), torch.float32)
        limit = allowed(a.to(dtype), abs(expected), noise, relative, factor)
        yield Difference(step, kind, "", rank, distance(a, b), abs(expected), limit)

    step = -1
    yield from between("initial weight", reference.initial, record.initial, None, {})
    empty = Step()
    for step, (expected, actual) in enumerate(zip(reference.steps, record.steps, strict=True)):
        twin = disturbed.steps[step] if disturbed is not None else empty
        if rank == 0:  # the loss that is compared is the mean over the ranks; it is in the first record
            yield from numbers("loss", expected.loss, actual.loss, twin.loss)
        gradients = _as_they_were_read(expected, actual)
        yield from between("gradient", gradients, actual.gradients, twin.gradients, {})
        yield from numbers("norm", expected.norm, actual.norm, twin.norm)
        yield from between("weight", expected.weights, actual.weights, twin.weights, reference.initial)
        yield from between("buffer", expected.buffers, actual.buffers, twin.buffers, {})
        yield from between("state", expected.states, actual.states, twin.states, {})
    step = len(reference.steps)
    yield from between("other", reference.others, record.others, disturbed.others if disturbed else None, {})


def _as_they_were_read(expected: Step, actual: Step) -> Tensors:
    """The gradients of the reference; clipped, where a rank clips by code of its own before its gradients are read."""
    if expected.clipped is None or actual.norm is not None or actual.gradients.keys() != expected.gradients.keys():
        return expected.gradients
    length, whole = _length(actual.gradients), _length(expected.gradients)
    if abs(length - expected.clipped * whole) >= abs(length - whole):
        return expected.gradients
    return {name: value * expected.clipped for name, value in expected.gradients.items()}


def _length(tensors: Tensors) -> float:
    return float(sum(float(one.double().square().sum()) for one in tensors.values()) ** 0.5)
