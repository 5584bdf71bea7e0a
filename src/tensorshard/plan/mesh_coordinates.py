"""The index of a rank along each axis of a mesh: pure arithmetic, without torch or a world."""

import math

from tensorshard.plan.plan import AXES


def coordinates(rank: int, degrees: dict[str, int]) -> dict[str, int]:
    """`rank`'s index along every axis."""
    found: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, degrees[axis])
    return {axis: found[axis] for axis in AXES}


def group_ranks(rank: int, axis: str, degrees: dict[str, int]) -> list[int]:
    """The ranks that differ from `rank` only along `axis`, itself included."""
    stride = math.prod(degrees[inner] for inner in AXES[AXES.index(axis) + 1 :])
    first = rank - coordinates(rank, degrees)[axis] * stride
    return [first + i * stride for i in range(degrees[axis])]
