"""Choosing cuts so that the costliest stage costs least."""

from collections.abc import Callable, Sequence
from itertools import accumulate

# Cuts that are worse than the best balance by no more than this may be taken if they send less.
_TOLERANCE = 0.02


def balanced_positions(
    costs: Sequence[float], stages: int, allowed: Sequence[int], sent: Callable[[int], int]
) -> list[int]:
    """Positions of ``stages - 1`` cuts, out of those `allowed`.

    The costliest stage costs as little as possible. Of the cuts that come near to that, those that send the fewest
    bytes are taken, and of these the ones with the most equal stages.

    Args:
        costs: of the calls.
        allowed: positions, in order; there are enough of them.
        sent: bytes that a cut at a position sends.
    """
    sums = [0.0, *accumulate(costs)]
    edges = [0, *allowed, len(costs)]
    weights = [float(sent(position)) for position in allowed]
    smallest = _cheapest(edges, stages, lambda i, j: sums[edges[j]] - sums[edges[i]], max)[0]
    bound = smallest * (1 + _TOLERANCE) + 1e-12
    total = (sums[-1] or 1.0) ** 2
    most = max(weights, default=0.0) or 1.0

    def price(i: int, j: int) -> float:
        size = sums[edges[j]] - sums[edges[i]]
        if size > bound:
            return float("inf")
        sending = weights[j - 1] / most if j - 1 < len(weights) else 0.0
        return sending + 1e-3 * size * size / total

    chosen = _cheapest(edges, stages, price, lambda a, b: a + b)[1]
    return [edges[index] for index in chosen]


def _cheapest(
    edges: Sequence[int],
    stages: int,
    price: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The best way to go from the first edge to the last in `stages` steps: its price, and the edges between."""
    last = len(edges) - 1
    best = [(price(0, j) if j else float("inf"), [0]) for j in range(last + 1)]
    for stage in range(2, stages + 1):
        after = [(float("inf"), [0])] * (last + 1)
        for j in range(stage, last + 1):
            candidates = ((join(best[i][0], price(i, j)), i) for i in range(stage - 1, j) if best[i][0] < float("inf"))
            value, i = min(candidates, default=(float("inf"), 0))
            after[j] = (value, [*best[i][1], i])
        best = after
    return best[last][0], best[last][1][1:]
