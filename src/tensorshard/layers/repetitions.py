"""Loops whose turns are alike. What only counts what they do, and computes nothing, may take fewer turns."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Turns = Callable[[list[slice]], Iterable[slice]]

_shorten: list[Turns] = []


def repetitions(turns: list[slice]) -> Iterable[slice]:
    """`turns`: the slices that a loop works on one after the other, of one length but for the last."""
    return _shorten[-1](turns) if _shorten else turns


@contextmanager
def shortened(turns: Turns) -> Iterator[None]:
    """Inside, loops take those of their turns that `turns` chooses. Their results are of no use then."""
    _shorten.append(turns)
    try:
        yield
    finally:
        _shorten.pop()
