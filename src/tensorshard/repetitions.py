"""Loops whose iterations are alike. An estimate counts operations and computes nothing, so it may run fewer of them."""

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


@contextmanager
def shortened(turns: Turns) -> Iterator[None]:
    """Inside this context, loops run only the iterations that `turns` chooses. Their results are not valid then."""
    _shorten.append(turns)
    try:
        yield
    finally:
        _shorten.pop()
