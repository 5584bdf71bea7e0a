"""Loops whose iterations do equal work. What counts operations and computes nothing runs a sample of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_Choice = Callable[[list[slice]], Iterable[slice]]

_choices: list[_Choice] = []


def loop_slices(slices: list[slice]) -> Iterable[slice]:
    """The iterations that a loop runs: all `slices`, or fewer inside :func:`sample_loops`.

    Args:
        slices: what the loop works on, one after the other. All but the last have the same length.
    """
    return _choices[-1](slices) if _choices else slices


class SampledLoop:
    """Runs the first, the second and the last of equal iterations. The second one counts for all those in between.

    Attributes:
        times: how many iterations, of this loop and those around it, what is done now counts for.
    """

    def __init__(self) -> None:
        self.times = 1

    def __call__(self, slices: list[slice]) -> Iterator[slice]:
        if len(slices) <= 3:
            yield from slices
            return
        yield slices[0]
        before = self.times
        self.times = before * (len(slices) - 2)
        try:
            yield slices[1]
        finally:
            self.times = before
        yield slices[-1]


@contextmanager
def sample_loops(choice: _Choice) -> Iterator[None]:
    """Inside this context, loops run only the iterations that `choice` returns. Their results are not valid then."""
    _choices.append(choice)
    try:
        yield
    finally:
        _choices.pop()
