"""Loops whose iterations are alike. What counts operations and computes nothing may run fewer of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Turns = Callable[[list[slice]], Iterable[slice]]

_shorten: list[Turns] = []


def repetitions(turns: list[slice]) -> Iterable[slice]:
    """The iterations that a loop runs: all `turns`, or fewer inside :func:`shortened`.

    Args:
        turns: the slices that the loop works on, one after the other. All but the last have the same length.
    """
    return _shorten[-1](turns) if _shorten else turns


class FewTurns:
    """Runs the first, the second and the last of equal iterations. The second one counts for all those in between.

    Attributes:
        times: how many iterations, of this loop and those around it, what is done now counts for.
    """

    def __init__(self) -> None:
        self.times = 1

    def __call__(self, turns: list[slice]) -> Iterator[slice]:
        if len(turns) <= 3:
            yield from turns
            return
        yield turns[0]
        before = self.times
        self.times = before * (len(turns) - 2)
        try:
            yield turns[1]
        finally:
            self.times = before
        yield turns[-1]


@contextmanager
def shortened(turns: Turns) -> Iterator[None]:
    """Inside this context, loops run only the iterations that `turns` chooses. Their results are not valid then."""
    _shorten.append(turns)
    try:
        yield
    finally:
        _shorten.pop()
