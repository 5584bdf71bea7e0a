"""Medians, ratios to the best peer, and whether contenders computed the same thing."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Comparison:
    """One contender's measurements of one quantity of which less is better.

    Args:
        rounds: the measurement of each round, in the quantity's unit.
        median: of the rounds.
        ratio: the median over the best peer's median; None if no peer was measured, or that peer's median is 0 (such
            as bytes read from a file that is all in the page cache).
        lowest_ratio, highest_ratio: of the ratios to that peer within a round. Contenders of one round run one
            after the other under the same noise, so these show how exact `ratio` is.
    """

    rounds: tuple[float, ...]
    median: float
    ratio: float | None
    lowest_ratio: float | None
    highest_ratio: float | None


def compare(samples: Mapping[str, Sequence[float]], peers: Collection[str]) -> dict[str, Comparison]:
    """Compares every contender with the best one of `peers`: the one with the lowest median.

    Args:
        samples: each contender's measurements, one a round; the same number for all.
        peers: the contenders that may be the best peer. Those not in `samples` are passed over.

    Raises:
        ValueError: a contender without measurements, or with another number of them than the others.
    """
    counts = {name: len(values) for name, values in samples.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise ValueError(f"every contender needs the same number of rounds, at least one; there are {counts}")
    medians = {name: median(values) for name, values in samples.items()}
    measured_peers = [name for name in samples if name in peers]
    best = min(measured_peers, key=medians.__getitem__, default=None)
    if best is not None and 0 in (medians[best], *samples[best]):
        best = None
    comparisons = {}
    for name, values in samples.items():
        ratios = [] if best is None else [a / b for a, b in zip(values, samples[best], strict=True)]
        comparisons[name] = Comparison(
            rounds=tuple(values),
            median=medians[name],
            ratio=None if best is None else medians[name] / medians[best],
            lowest_ratio=min(ratios, default=None),
            highest_ratio=max(ratios, default=None),
        )
    return comparisons


class LossMismatchError(AssertionError):
    """Contenders that should compute the same did not, so their times cannot be compared."""


def check_losses_agree(losses: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Checks that every contender saw the same losses as the first, to a relative `tolerance`.

    Args:
        losses: each contender's loss after every step, in nats.
        tolerance: largest accepted relative difference.

    Raises:
        LossMismatchError: losses that differ by more, are not finite, or are not equally many.
    """
    if not losses:
        return
    reference_name, reference = next(iter(losses.items()))
    for name, values in losses.items():
        if len(values) != len(reference):
            raise LossMismatchError(
                f"{name} reports {len(values)} losses, but {reference_name} {len(reference)}; "
                f"all must run as many steps"
            )
        for step, (value, expected) in enumerate(zip(values, reference, strict=True), start=1):
            if not math.isclose(value, expected, rel_tol=tolerance) or not math.isfinite(value):
                raise LossMismatchError(
                    f"after step {step} the loss of {name} is {value:.7g}, but that of {reference_name} is "
                    f"{expected:.7g}: more than {tolerance:g} apart, relatively; they train differently"
                )
